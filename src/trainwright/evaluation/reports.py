"""Reports on a model's outputs: scikit-learn's classification report, or R2, MAE and RMSE, with a plot."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.core.checks import check_choice, name_of
from trainwright.core.device import move
from trainwright.core.errors import DataError, NonFiniteError, SettingError
from trainwright.core.records import StepOutput
from trainwright.core.rng import rng_preserved
from trainwright.core.trees import detached, shapes_of
from trainwright.data.source import Source
from trainwright.evaluation.passes import autocast, side_effect_free
from trainwright.evaluation.predictions import join, make_outputs
from trainwright.metrics.metrics import IGNORED
from trainwright.metrics.scores import MAE, R2, RMSE
from trainwright.metrics.totals import Total
from trainwright.precision.autocast import beside_training
from trainwright.update.batches import scores_of
from trainwright.update.batches import split as default_split
from trainwright.update.trainer_like import TrainerLike

Kind = Literal["classes", "values"]
ReportKind = Literal["auto", "classes", "values"]

_MOST_LINES = 20
"""Maximum number of columns listed in the text."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Report:
    """Outputs compared with targets over all rows of a data set. `print` shows `text`."""

    kind: Kind
    text: str
    """A table: precision, recall and F1 of each class, or R2, MAE and RMSE."""
    output: Any
    """The outputs of `predict_step`, joined, on the CPU; a list of batches if their shapes differ."""
    target: Any
    """The targets, ignored ones included."""
    names: tuple[str, ...]
    """The classes in the order of the confusion matrix, or the columns of the values."""
    numbers: dict[str, Any]
    """The numbers; `to_dict` returns a copy."""

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the numbers as a table, for a notebook."""
        from trainwright.core.figures import html_table

        rows = self.numbers if self.kind == "classes" else {**self.numbers.get("columns", {}), "all": self.numbers}
        scores = {name: one for name, one in rows.items() if isinstance(one, dict)}
        head = [name for name in next(iter(scores.values())) if name != "columns"]
        table = html_table(
            ([name, *(one.get(key, "") for key in head)] for name, one in scores.items()), head=["", *head]
        )
        return table + (html_table([("accuracy", self.numbers["accuracy"])]) if "accuracy" in self.numbers else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data.

        Classes: the dict of scikit-learn, and "confusion_matrix" with one row per true class. Values: "R2", "MAE",
        "RMSE" and "rows"; with several columns also "columns", with the same numbers for each.
        """
        return copy.deepcopy(self.numbers)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the confusion matrix, or outputs over targets; save the plot if `path` is given.

        Returns a matplotlib Figure. SettingError without matplotlib.
        """
        from trainwright.core.figures import confusion_figure, values_figure

        if self.kind == "classes":
            return confusion_figure(self.numbers["confusion_matrix"], self.names, path=path)
        target, output = _columns(self.target), _columns(self.output)
        return values_figure(target, output, names=self.names, path=path)


def report(
    trainer: TrainerLike,
    source: Source,
    *,
    kind: ReportKind = "auto",
    names: Sequence[str] | None = None,
) -> Report:
    """Compare the outputs of `predict_step` with the targets over one pass of `source`, without side effects.

    `kind`: "auto" chooses by the loss, else by dtypes and shapes. `names`: of the classes, from class 0, or of the
    columns. Targets that the loss ignores are left out. With several ranks each runs its rows, and all return the
    report on all rows. SettingError if outputs and targets cannot be compared, or if "auto" cannot decide.
    """
    check_choice(kind, "report", "kind", choices=("auto", "classes", "values"))
    if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
        raise SettingError(f"report(names={names!r})", want="a list of strings, one for each class or column")
    pairs = _compared(trainer, source)
    with beside_training(trainer.device.type):
        made = _made(trainer, pairs, kind, names=names)
    return dataclasses.replace(made, text=f"{made.text}\n{source.limit}") if source.limit else made


def _made(
    trainer: TrainerLike, pairs: list[tuple[Tensor, Tensor]], kind: ReportKind, *, names: Sequence[str] | None
) -> Report:
    kind = find_task_type(trainer.loss, pairs) if kind == "auto" else kind
    made = _of_classes(trainer, pairs, names) if kind == "classes" else _of_values(pairs, names)
    text, shown, numbers = made
    outputs, targets = ([pair[place] for pair in pairs] for place in (0, 1))
    return Report(kind=kind, text=text, output=join(outputs), target=join(targets), names=tuple(shown), numbers=numbers)


def _compared(trainer: TrainerLike, source: Source) -> list[tuple[Tensor, Tensor]]:
    """Return (output, target) of every batch over all ranks, on the CPU, in data order."""
    host, pairs = torch.device("cpu"), make_outputs(trainer)
    with side_effect_free(trainer, source) as aside, _split_once(trainer) as split_of:
        to_device = trainer._hooks.move
        for batch in pairs.batches(aside):
            moved = batch if to_device is None else to_device(batch)
            with autocast(trainer):
                returned = trainer.predict_step(moved)
            output, target = returned if trainer.loss is not None else scores_of(returned), None
            if type(returned) is StepOutput:
                output, target = returned.output, returned.target
            target = split_of(moved)[1] if target is None else target
            _check_tensors(output, target)
            pairs.append((move(detached(output), host), move(detached(target), host)))
        compared = pairs.in_order()
    if not compared:
        raise DataError("the data to report on gave no batch", want="at least one batch")
    return compared


@contextmanager
def _split_once(trainer: TrainerLike) -> Iterator[Callable[[Any], tuple[Any, Any]]]:
    """Yield a function that returns (inputs, target) of a batch: as split by the step, else by a call of `split`.

    A custom `split` may draw random numbers or change the batch. A second call would return a target that does not
    belong to the output.
    """
    hooks, made = trainer._hooks, list[tuple[Any, Any]]()

    def noting(batch: Any) -> tuple[Any, Any]:
        made.append(hooks.split(batch))
        return made[-1]

    def split_of(batch: Any) -> tuple[Any, Any]:
        if not made and hooks.split is default_split:
            _check_known_target(trainer, batch)
        found = made[-1] if made else hooks.split(batch)
        made.clear()
        return found

    trainer._hooks = dataclasses.replace(hooks, split=noting)
    try:
        yield split_of
    finally:
        trainer._hooks = hooks


def _check_known_target(trainer: TrainerLike, batch: Any) -> None:
    """Refuse to take the last of many items as the target, unless a training step has used it as such."""
    if not isinstance(batch, tuple | list) or len(batch) < 3:
        return
    from trainwright.diagnostics.rules import splits_in_training

    if not splits_in_training(trainer):
        raise SettingError(
            f"a report compares outputs with targets, and which of the {len(batch)} items of a batch is the target "
            "only your training_step knows",
            want="the target beside the output, for the same rows",
            fix="return StepOutput(None, output, target) from predict_step(self, batch), as from training_step",
        )


def _check_tensors(output: Any, target: Any) -> None:
    if target is None:
        raise SettingError(
            "a report compares outputs with targets, and a batch holds no target",
            want="(inputs, target), or a dict with 'target', 'targets', 'labels', 'label' or 'y'",
            fix="override split(self, batch) -> (inputs, target), "
            "or return StepOutput(None, output, target) from predict_step",
        )
    for name, value in (("output", output), ("target", target)):
        if not isinstance(value, Tensor) or not value.dim():
            shown = "a tensor of one number" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise SettingError(
                f"a report reads tensors, and the {name} of a batch is {shown}",
                want="output and target with a row for each row of the batch",
                fix="override predict_step(self, batch): return StepOutput(None, output, target)",
            )


def _of_classes(
    trainer: TrainerLike, pairs: list[tuple[Tensor, Tensor]], names: Sequence[str] | None
) -> tuple[str, Sequence[str], dict[str, Any]]:
    with rng_preserved():  # scikit-learn 1.9 imports rich where it is installed, which draws from Python's `random`
        from sklearn.metrics import classification_report, confusion_matrix

    decided = guess_classes(trainer.loss, pairs)
    guess, truth = decided.guess.numpy(), decided.target.numpy()
    seen = sorted({*truth.tolist(), *guess.tolist()})
    if names is not None:
        _check_names(names, seen, classes=decided.classes)
    labels = seen if names is None else list(range(len(names)))
    shown = [str(label) for label in labels] if names is None else list(names)
    settings = {"labels": labels, "target_names": shown, "zero_division": 0}  # the default, without its warning
    text = str(classification_report(truth, guess, **settings))
    numbers = _plain(classification_report(truth, guess, output_dict=True, **settings))
    numbers["confusion_matrix"] = confusion_matrix(truth, guess, labels=labels).tolist()
    return "\n".join([text.rstrip("\n"), *decided.notes]), shown, numbers


def _check_names(names: Sequence[str], seen: Sequence[int], *, classes: int | None) -> None:
    highest = max(seen)
    if (classes is not None and len(names) != classes) or highest >= len(names):
        raise SettingError(
            f"report(names=...) with {len(names)} names",
            have=f"{highest + 1 if classes is None else classes} classes",
            want="one name for each class, from class 0",
        )


def _plain(value: Any) -> Any:
    """Return nested dicts with Python numbers instead of NumPy's."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _of_values(
    pairs: list[tuple[Tensor, Tensor]], names: Sequence[str] | None
) -> tuple[str, Sequence[str], dict[str, Any]]:
    for found, true in pairs:
        MAE()(found, true)  # refuses shapes that would broadcast
    output, target = (_columns([pair[place] for pair in pairs]) for place in (0, 1))
    several = output.shape[1] > 1
    shown = [str(index) for index in range(output.shape[1])] if names is None else list(names)
    if len(shown) != output.shape[1]:
        raise SettingError(
            f"report(names=...) with {len(shown)} names", want=f"one for each of {output.shape[1]} columns"
        )
    rows = sum(len(true) for _, true in pairs)
    numbers: dict[str, Any] = {**_scores(output, target), "rows": rows}
    lines: dict[str, Any] = {}
    if several:
        pieces = zip(shown, output.unbind(1), target.unbind(1), strict=True)
        numbers["columns"] = {name: _scores(found, true) for name, found, true in pieces}
        lines = numbers["columns"] if len(shown) <= _MOST_LINES else {}
    lines = {**lines, f"all {len(shown)} columns" if several else "": numbers}
    return _table(lines, rows=rows), shown, numbers


def _columns(batches: Tensor | list[Tensor]) -> Tensor:
    """Return all batches as (rows, columns); one column of all elements if their shapes differ."""
    joined = join(batches) if isinstance(batches, list) else batches
    if isinstance(joined, Tensor):
        return joined.reshape(len(joined), -1)
    return torch.cat([batch.flatten() for batch in joined]).unsqueeze(1)


def _scores(output: Tensor, target: Tensor) -> dict[str, float]:
    r2, rmse, absolute = R2(), RMSE(), Total()
    absolute.take(MAE()(output, target), len(output))
    r2.update(output, target)
    rmse.update(output, target)
    return {"R2": float(r2.compute()), "MAE": absolute.value, "RMSE": rmse.compute()}


def _table(lines: dict[str, Any], *, rows: int) -> str:
    width = max(map(len, lines))
    names = ("R2", "MAE", "RMSE")
    head = " " * width + "".join(f"{name:>12}" for name in names) + f"{'rows':>10}"
    body = [
        f"{name:>{width}}" + "".join(f"{scores[column]:>12.5g}" for column in names) + f"{rows:>10}"
        for name, scores in lines.items()
    ]
    return "\n".join([head, "", *body])


OutputKind = Literal["classes", "logit", "probability", "values", "unknown"]

_LOSSES_BY_KIND: dict[OutputKind, tuple[Any, ...]] = {
    "classes": (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, F.cross_entropy, F.nll_loss, F.multi_margin_loss),
    "logit": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits),
    "probability": (nn.BCELoss, F.binary_cross_entropy),
    "values": (
        *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Guesses:
    """Predicted and true class numbers of all positions that count, flattened."""

    guess: Tensor
    target: Tensor
    classes: int | None
    """Number of class scores; None if the outputs are class numbers."""
    notes: tuple[str, ...] = ()
    """Lines on the rule of the predictions, for the text of the report."""


def output_kind(loss: Any) -> OutputKind:
    """Return the kind of outputs that a loss takes; "unknown" for a loss that is not torch's."""
    function = loss.func if isinstance(loss, partial) else loss
    for family, members in _LOSSES_BY_KIND.items():
        if function in members or any(isinstance(function, m) for m in members if isinstance(m, type)):
            return family
    return "unknown"


def find_task_type(loss: Any, pairs: list[tuple[Tensor, Tensor]]) -> Literal["classes", "values"]:
    """Return the task by the loss, else by dtypes and shapes. SettingError if the targets may be of either kind."""
    family = output_kind(loss)
    if family != "unknown":
        return "values" if family == "values" else "classes"
    output, target = pairs[0]
    if target.dtype is torch.bool or not output.is_floating_point() or _are_class_scores(output, target):
        return "classes"
    if target.is_floating_point() and not _may_be_classes(pairs):
        return "values"
    raise SettingError(
        "the targets may be classes or values, and the loss does not say which",
        have=f"{shapes_of(output, target)}; loss: {name_of(loss)}",
        want='kind="classes" (precision, recall, F1) or kind="values" (R2, MAE, RMSE)',
        fix='report(data, kind="classes")',
    )


def guess_classes(loss: Any, pairs: list[tuple[Tensor, Tensor]]) -> Guesses:
    """Return the predicted class of each target that counts.

    Scores (N, C, d...): the class of the largest. One output per target: class 1 above 0, or above 0.5 if the loss
    takes probabilities. Whole numbers: the class itself. SettingError for other shapes. NonFiniteError for a NaN.
    """
    family, ignored = output_kind(loss), _ignored(loss)
    missing = sum(int(output.isnan().sum()) for output, _ in pairs)
    if missing:
        raise NonFiniteError(
            f"{missing} of {sum(output.numel() for output, _ in pairs)} outputs are NaN, and so are no guess",
            fix="trainer.predict(data).isnan()   # finds the rows",
        )
    batches = [_guess_batch(output, target, family=family) for output, target in pairs]
    guess, target = torch.cat([batch.guess for batch in batches]), torch.cat([batch.target for batch in batches])
    counts = target != ignored
    if not counts.any():
        raise SettingError(f"every target is {ignored}, which the loss ignores", want="targets that count")
    first = batches[0]
    return Guesses(
        guess[counts], target[counts], first.classes, (*first.notes, *_notes_on_logits(pairs, first, family))
    )


def _guess_batch(output: Tensor, target: Tensor, *, family: OutputKind) -> Guesses:
    if not output.is_floating_point() and output.shape == target.shape:
        return Guesses(output.flatten().long(), target.flatten().long(), None)
    if output.dim() == 1 or output.shape[1] == 1:
        if output.numel() == target.numel() and len(output) == len(target):
            return _guess_binary(output, target, threshold=0.5 if family == "probability" else 0.0)
    elif _are_class_scores(output, target):
        return Guesses(output.argmax(1).flatten(), target.flatten().long(), output.shape[1])
    elif output.shape == target.shape and family not in ("logit", "probability"):
        return Guesses(output.argmax(1).flatten(), target.argmax(1).flatten(), output.shape[1])
    fix = "override predict_step(self, batch): return StepOutput(None, output, target)   # of these shapes"
    if output.shape == target.shape:
        fix = "report one label at a time: return StepOutput(None, output[:, 0], target[:, 0]) from predict_step"
    elif output.dim() > 2 and target.shape == output.shape[:-1]:
        fix = "return StepOutput(None, output.movedim(-1, 1), target) from predict_step"
    raise SettingError(
        "a report of classes cannot compare these",
        have=shapes_of(output, target),
        want="scores (N, C, d...) with class numbers (N, d...), or one output for each 0 or 1",
        fix=fix,
    )


def _guess_binary(output: Tensor, target: Tensor, *, threshold: float) -> Guesses:
    low, high = (float(bound) for bound in target.double().aminmax()) if target.numel() else (0.0, 0.0)
    if not (low >= 0 and high <= 1):
        raise SettingError(
            "one output for each target is a yes or no",
            have=f"targets from {low:g} to {high:g}",
            want="targets of 0 and 1",
            fix='report(data, kind="values"), or a model with a score for each class',
        )
    what = "a probability" if threshold else "a logit"
    note = f"\nguess: 1 where the output, {what}, is above {threshold:g}"
    return Guesses((output > threshold).flatten().long(), (target > 0.5).flatten().long(), 2, (note,))


def _notes_on_logits(pairs: list[tuple[Tensor, Tensor]], first: Guesses, family: OutputKind) -> list[str]:
    """Return a line if outputs that count as logits look like probabilities."""
    if not first.notes or family == "probability":
        return []
    if any(bool(((output < 0) | (output > 1)).any()) for output, _ in pairs):
        return []
    return [
        "all outputs lie from 0 to 1: if they are probabilities, return (output > 0.5).long() from predict_step",
    ]


def _are_class_scores(output: Tensor, target: Tensor) -> bool:
    """Whether shapes and dtypes fit class scores and class numbers."""
    fits = output.dim() > 1 and output.shape[1] > 1 and target.shape == output.shape[:1] + output.shape[2:]
    return fits and not target.is_floating_point()


def _may_be_classes(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether floating-point targets are all 0 or 1, or class probabilities that sum to 1."""
    if all(bool(((target == 0) | (target == 1)).all()) for _, target in pairs):
        return True
    return all(
        target.dim() > 1 and target.shape[1] > 1 and bool((target >= 0).all()) and _adds_up_to_one(target)
        for _, target in pairs
    )


def _adds_up_to_one(target: Tensor) -> bool:
    total = target.double().sum(1)
    return torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _ignored(loss: Any) -> int:
    """Return the `ignore_index` of a loss, or torch's default."""
    index = loss.keywords.get("ignore_index") if isinstance(loss, partial) else getattr(loss, "ignore_index", None)
    return index if isinstance(index, int) else IGNORED
