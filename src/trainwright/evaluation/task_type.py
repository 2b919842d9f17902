"""Which task a report is on, classes or values, and the guessed class of each output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.core.checks import name_of
from trainwright.core.errors import NonFiniteError, SettingError
from trainwright.core.trees import shapes_of
from trainwright.metrics.metrics import IGNORED

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
    """Guessed and true class numbers of all positions that count, flat."""

    guess: Tensor
    target: Tensor
    classes: int | None
    """The number of class scores; None where the outputs are class numbers already."""
    notes: tuple[str, ...] = ()
    """Lines on how the guesses were made, for the text of the report."""


def output_kind(loss: Any) -> OutputKind:
    """Return the kind of outputs that a loss reads; "unknown" for one that is not torch's own."""
    function = loss.func if isinstance(loss, partial) else loss
    for family, members in _LOSSES_BY_KIND.items():
        if function in members or any(isinstance(function, m) for m in members if isinstance(m, type)):
            return family
    return "unknown"


def find_task_type(loss: Any, pairs: list[tuple[Tensor, Tensor]]) -> Literal["classes", "values"]:
    """Return the task, found by the loss, else by dtypes and shapes; SettingError where the targets may be either."""
    family = output_kind(loss)
    if family != "unknown":
        return "values" if family == "values" else "classes"
    output, target = pairs[0]
    if target.dtype is torch.bool or not output.is_floating_point() or _are_class_scores(output, target):
        return "classes"
    if target.is_floating_point() and not _may_be_classes(pairs):
        return "values"
    raise SettingError(
        "the targets may be classes or values, and the loss does not tell",
        have=f"{shapes_of(output, target)}; loss: {name_of(loss)}",
        want='kind="classes" (precision, recall, F1) or kind="values" (R2, MAE, RMSE)',
        fix='report(data, kind="classes")',
    )


def guess_classes(loss: Any, pairs: list[tuple[Tensor, Tensor]]) -> Guesses:
    """Return a guess for each target that counts; SettingError where the shapes do not allow it.

    Scores (N, C, d...) are guesses by their largest; one output per target is a yes or no, above 0, or above 0.5
    where the loss takes probabilities; whole numbers are guesses already. NonFiniteError for a NaN among the scores.
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
    """Return a line where outputs that were taken for logits look like probabilities."""
    if not first.notes or family == "probability":
        return []
    if any(bool(((output < 0) | (output > 1)).any()) for output, _ in pairs):
        return []
    return [
        "all outputs lie from 0 to 1: if they are probabilities, return (output > 0.5).long() from predict_step",
    ]


def _are_class_scores(output: Tensor, target: Tensor) -> bool:
    """Whether shapes and dtypes are those of scores and class numbers."""
    fits = output.dim() > 1 and output.shape[1] > 1 and target.shape == output.shape[:1] + output.shape[2:]
    return fits and not target.is_floating_point()


def _may_be_classes(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether floating targets are all 0 or 1, or probabilities of classes that add up to 1."""
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
    """Return the `ignore_index` of a loss, torch's default where it has none."""
    index = loss.keywords.get("ignore_index") if isinstance(loss, partial) else getattr(loss, "ignore_index", None)
    return index if isinstance(index, int) else IGNORED
