"""The scores MAE, RMSE, R2 and F1, exact over all rows of a pass.

Each is tested against scikit-learn. `update` does not read from the device. A NaN in output or target gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trainwright.core.device import widest_float
from trainwright.core.errors import DataError, SettingError
from trainwright.core.records import SumLoss
from trainwright.core.suggestions import suggests
from trainwright.core.trees import shapes_of
from trainwright.metrics.metrics import IGNORED
from trainwright.metrics.totals import Total
from trainwright.protocols import Tree

__all__ = ["F1", "MAE", "R2", "RMSE"]

Kind = Literal["macro", "micro", "weighted", "binary"]


class MAE:
    """Mean absolute error over all elements; `output` and `target` have the same shape, (n) or (n, d...).

    If a row is one element, the metric gives one value per row, so that early stopping can use its standard error.
    """

    def __call__(self, output: Tensor, target: Tensor) -> SumLoss:
        """Return the absolute errors of a batch, or their sum, with their count."""
        errors = _difference("MAE", output, target).abs()
        if errors.numel() == len(errors):
            return SumLoss(errors.flatten(), len(errors))
        return SumLoss(errors.sum(), errors.numel())


class RMSE:
    """Root mean squared error over all elements; `output` and `target` have the same shape, (n) or (n, d...)."""

    def __init__(self) -> None:
        self._squares = Total()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add one batch."""
        squares = _difference("RMSE", output, target).square()
        self._squares.add_sum(squares.sum(), squares.numel())

    def compute(self) -> float:
        """Return the root of the mean; NaN without rows."""
        return math.sqrt(self._squares.value)

    def reset(self) -> None:
        """Reset to the state without rows."""
        self._squares.reset()

    def merge(self, other: RMSE) -> None:
        """Add the sums of another object."""
        self._squares.merge(other._squares)

    def state_dict(self) -> Tree:
        """Return sum and count."""
        return self._squares.state_dict()

    def load_state_dict(self, tree: Any) -> None:
        """Load saved sum and count."""
        self._squares.load_state_dict(tree)


class R2:
    """Coefficient of determination: 1 - residual / total sum of squares, averaged over columns.

    `output` and `target` have the same shape, (n) or (n, d...); each element of a row is a column. As in scikit-learn,
    a constant column gives 1 if it is predicted exactly, else 0, and fewer than two rows give NaN. Sums are float64
    (float32 on devices without it), of deviations from the first row, and are merged as in Chan, Golub and LeVeque
    (1983), so that a large offset of the targets causes no cancellation.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add one batch."""
        residuals = _difference("R2", output, target)
        new = len(residuals)
        if not new:
            return
        residuals, values = residuals.reshape(new, -1), _wide(target).reshape(new, -1)
        self._make_ready(values)
        deviations = values - self._state["first"]
        mean = deviations.mean(0)
        sums = {"mean": mean, "spread": (deviations - mean).square().sum(0), "residual": residuals.square().sum(0)}
        self._add(sums, new)

    def compute(self) -> Tensor | float:
        """Return the score, a tensor on the device; NaN for fewer than two rows."""
        if self._rows < 2:
            return math.nan
        residual, spread = self._state["residual"], self._state["spread"]
        constant = torch.where(residual == 0, 1.0, 0.0).to(residual.dtype)
        return torch.where(spread == 0, constant + 0 * residual, 1 - residual / spread).mean()

    def reset(self) -> None:
        """Reset to the state without rows."""
        self._rows = 0
        self._state: dict[str, Tensor] = {}

    def merge(self, other: R2) -> None:
        """Add the sums of another object, relative to this object's first row."""
        if not other._rows:
            return
        if not self._rows:
            self.load_state_dict(other.state_dict())
            return
        first = self._state["first"]
        sums = {name: tensor.to(first.device, first.dtype) for name, tensor in other._state.items()}
        self._make_ready(sums["first"].unsqueeze(0))  # checks the number of columns
        sums["mean"] += sums["first"] - first
        self._add(sums, other._rows)

    def state_dict(self) -> Tree:
        """Return the number of rows, the first row, and the sums of each column."""
        return {"rows": self._rows, "sums": {name: tensor.clone() for name, tensor in self._state.items()}}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load saved sums; they are moved to the device of the next batch."""
        self._rows = tree["rows"]
        self._state = {name: tensor.clone() for name, tensor in tree["sums"].items()}

    def _add(self, sums: Mapping[str, Tensor], new: int) -> None:
        """Merge the sums of `new` rows into the current ones; both are deviations from the same first row."""
        state, seen = self._state, self._rows
        moved = sums["mean"] - state["mean"]
        state["spread"] += sums["spread"] + moved.square() * (seen * new / (seen + new))
        state["mean"] += moved * (new / (seen + new))
        state["residual"] += sums["residual"]
        self._rows += new

    def _make_ready(self, values: Tensor) -> None:
        if not self._state:
            zeros = {name: torch.zeros_like(values[0]) for name in ("mean", "spread", "residual")}
            self._state = {"first": values[0].clone(), **zeros}
        first = self._state["first"]
        if len(first) != values.shape[1]:
            raise SettingError(
                "R2 compares columns, and the batches have different numbers of them",
                have=f"{values.shape[1]} after {len(first)}",
                want="rows of one shape",
            )
        if first.device != values.device:
            self._state = {name: tensor.to(values.device, values.dtype) for name, tensor in self._state.items()}


@suggests
class F1:
    """F1 score: 2 hits / (predictions + targets) of each class, from counts over all rows.

    `output` has scores of shape (N, C, d...), and `target` class indices of shape (N, d...), of which -100 is ignored.
    Or `output` has logits of shape (N) or (N, 1, d...), positive above 0, and `target` is positive above 0.5. A class
    without predictions and targets has the score 0.

    Args:
        average: "macro" is the plain mean over classes, "weighted" the mean weighted by the number of targets, "micro"
            the score of the summed counts, "binary" the score of class 1 of two classes.
        classes: The classes to average over. None: all classes with targets or predictions, as in scikit-learn.
    """

    _counts: Tensor | None
    """Hits, predictions and targets of each class, shape (3, C + 1); the last column is for ignored targets."""
    _flaws: Tensor
    """The number of NaN scores or targets, and the number of targets that are no class."""

    def __init__(self, average: Kind = "macro", *, classes: Sequence[int] | None = None) -> None:
        if average not in get_args(Kind):
            raise SettingError(f"F1({average!r})", want=" or ".join(map(repr, get_args(Kind))))
        if classes is not None and (average == "binary" or not _are_class_numbers(classes)):
            fix = 'F1("binary")' if average == "binary" else "F1(classes=[1, 2])"
            want = "no classes: class 1 is scored" if average == "binary" else "class numbers, each once"
            raise SettingError(f"F1({average!r}, classes={classes!r})", want=want, fix=fix)
        self.average = average
        self.classes = None if classes is None else tuple(classes)
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add one batch."""
        guess, truth, classes = _decided(output, target)
        counts = self._counts_of(classes, output.device)
        counted = truth != IGNORED
        valid = counted & (truth >= 0) & (truth < classes)
        ones = torch.ones_like(truth)
        # Ignored and invalid targets are counted in the last column, after the classes.
        for row, numbers, holds in ((0, truth, valid & (guess == truth)), (1, guess, valid), (2, truth, valid)):
            counts[row].index_add_(0, torch.where(holds, numbers, classes), ones)
        missing = output.isnan().flatten() if output.numel() == len(truth) else output.isnan().any(1).flatten()
        missing = missing & counted | target.isnan().flatten()
        self._flaws += torch.stack([missing.sum(), (counted & ~valid).sum()])

    def compute(self) -> float:
        """Return the score; NaN without counted targets, or if a score or target was NaN.

        DataError if a target is no class.
        """
        if self._counts is None:
            return math.nan
        hits, guesses, targets = (row[:-1] for row in self._counts.tolist())
        without_score, without_class = self._flaws.tolist()
        if without_class:
            raise DataError(
                f"F1: {without_class} targets are no class", want=f"numbers from 0 to {len(hits) - 1}, or -100"
            )
        if without_score or not sum(targets):
            return math.nan
        seen = [number for number in range(len(hits)) if guesses[number] + targets[number]]
        numbers = (1,) if self.average == "binary" else seen if self.classes is None else self.classes
        totals = [guesses[number] + targets[number] for number in numbers]
        if self.average == "micro":
            return _f1(sum(hits[number] for number in numbers), sum(totals))
        scores = [_f1(hits[number], total) for number, total in zip(numbers, totals, strict=True)]
        weights = [targets[number] if self.average == "weighted" else 1 for number in numbers]
        weighted = sum(score * weight for score, weight in zip(scores, weights, strict=True))
        return weighted / (sum(weights) or 1)

    def reset(self) -> None:
        """Reset to the state without rows."""
        self._counts = None
        self._flaws = torch.zeros(2, dtype=torch.int64)

    def merge(self, other: F1) -> None:
        """Add the counts of another object."""
        if other._counts is not None:
            where = other._counts.device if self._counts is None else self._counts.device
            counts = self._counts_of(other._counts.shape[1] - 1, where)
            counts += other._counts.to(where)
            self._flaws += other._flaws.to(where)

    def state_dict(self) -> Tree:
        """Return the counts."""
        return {"counts": None if self._counts is None else self._counts.clone(), "flaws": self._flaws.clone()}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load saved counts; they are moved to the device of the next batch."""
        self._counts = None if tree["counts"] is None else tree["counts"].clone()
        self._flaws = tree["flaws"].clone()

    def _counts_of(self, classes: int, device: torch.device) -> Tensor:
        """Return the counts, allocated at the first batch and moved to the device of the outputs."""
        if self._counts is None:
            self._check(classes)
        counts = torch.zeros(3, classes + 1, dtype=torch.int64) if self._counts is None else self._counts
        if counts.shape[1] != classes + 1:
            raise SettingError(f"F1: an output of {classes} classes", want=f"{counts.shape[1] - 1}, as before")
        self._counts, self._flaws = counts.to(device), self._flaws.to(device)
        return self._counts

    def _check(self, classes: int) -> None:
        if self.average == "binary" and classes != 2:
            raise SettingError(
                f'F1("binary") scores one of two classes, and the output has {classes}',
                fix='F1("macro"), "micro" or "weighted"',
            )
        if self.classes is not None and max(self.classes) >= classes:
            raise SettingError(f"F1(classes={self.classes})", want=f"numbers from 0 to {classes - 1}")


def _f1(hits: int, total: int) -> float:
    return 2 * hits / total if total else 0.0


def _are_class_numbers(classes: Any) -> bool:
    if not isinstance(classes, Sequence) or isinstance(classes, str) or not classes:
        return False
    are_numbers = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in classes)
    return are_numbers and len(set(classes)) == len(classes)


def _decided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return predicted and true class indices, both flat, and the number of classes."""
    if output.dim() == 1 or (output.dim() > 1 and output.shape[1] == 1):
        if output.numel() != target.numel():
            raise _misfit_of_classes(output, target)
        return (output > 0).flatten().long(), (target > 0.5).flatten().long(), 2
    fits = output.dim() > 1 and target.shape == output.shape[:1] + output.shape[2:]
    if not fits or target.is_floating_point():
        raise _misfit_of_classes(output, target)
    return output.argmax(1).flatten(), target.flatten().long(), output.shape[1]


def _misfit_of_classes(output: Tensor, target: Tensor) -> SettingError:
    fix = "StepOutput(loss, output, target)   # of these shapes, from validation_step"
    if output.shape == target.shape:
        fix = "StepOutput(loss, output, target.argmax(1))   # where targets are one-hot or probabilities"
    elif output.dim() > 2 and target.shape == output.shape[:-1]:
        fix = "StepOutput(loss, output.movedim(-1, 1), target)"
    return SettingError(
        "F1 cannot compare these shapes",
        have=shapes_of(output, target),
        want="scores (N, C, d...) and class numbers (N, d...), or a logit and 0 or 1 for each row",
        fix=fix,
    )


def _difference(name: str, output: Any, target: Any) -> Tensor:
    """Return output - target, detached, in the widest dtype; SettingError if their shapes differ."""
    tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
    if tensors and output.dim() and output.shape == target.shape:
        return _wide(output) - _wide(target)
    if not tensors:
        have = f"output of type {type(output).__name__}, target of type {type(target).__name__}"
        fix = "StepOutput(loss, output, target) with two tensors"
    else:
        have = shapes_of(output, target)
        fix = "bring output and target to one shape"
        if output.shape == (*target.shape, 1):
            fix = "output.squeeze(-1) in the model, or targets of shape (n, 1): y[:, None]"
        elif target.shape == (*output.shape, 1):
            fix = "targets of shape (n): y.squeeze(-1)"
    want = "output and target of one shape, (n) or (n, d...); others are broadcast against each other"
    raise SettingError(f"{name} cannot compare these", have=have, want=want, fix=fix)


def _wide(values: Tensor) -> Tensor:
    return values.detach().to(widest_float(values.device))
