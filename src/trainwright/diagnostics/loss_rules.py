"""Recognises what is wrong between an output and a target when a loss of torch's has refused them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.diagnostics.frames import MISSING, Site, dtype_name, place_of_fix, shown
from trainwright.update.losses import fix_of_shapes

CLASSES = ("cross_entropy", "nll_loss")
YES_OR_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
MOST_READ = 10_000_000
"""Targets above this many are not searched."""


def loss_cause(site: Site) -> tuple[str, str] | None:
    """Why the loss has failed and what to write instead, or None where it did not, or nobody knows."""
    if not site.in_loss:
        return None
    if (found := _no_tensor(site)) is not None:
        return found
    frame = site.torch_loss
    if frame is None:
        return None
    output, target = frame.f_locals["input"], frame.f_locals["target"]
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    name = frame.f_code.co_name
    looks: tuple[Callable[[Site, Tensor, Tensor], tuple[str, str] | None], ...] = ()
    if name in CLASSES:
        looks = (_types_of_classes, _shapes_of_classes, _range_of_classes)
    elif name in YES_OR_NO:
        looks = (_types_of_answers, _shapes_of_answers, _no_probabilities)
    return next((found for look in looks if (found := look(site, output, target)) is not None), None)


def loss_name(site: Site) -> str:
    """The name of the loss: of torch's function where the step calls it itself."""
    loss, frame = site.owner.loss, site.torch_loss
    if frame is not None and not site.calls_own_loss:
        return str(frame.f_code.co_name)
    function = loss.func if isinstance(loss, partial) else loss
    return type(loss).__name__ if isinstance(loss, nn.Module) else str(getattr(function, "__name__", "the loss"))


def _no_tensor(site: Site) -> tuple[str, str] | None:
    """A model that gives more than one tensor, or an object that holds some."""
    output, model = site.output, type(site.owner.model).__name__
    if output is MISSING or isinstance(output, Tensor) or not isinstance(site.error, TypeError | AttributeError):
        return None
    kind = f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list | Mapping) else "")
    why = f"{model} returned {kind}: {shown(output)}; {loss_name(site)} takes one tensor"
    loss = loss_name(site) + ("()" if isinstance(site.owner.loss, nn.Module) else "")
    part = _scores(output)
    if not site.steps_by_default:
        return why, f"{part} in {place_of_fix(site)}"
    return why, f"Trainer(..., loss=lambda output, target: {_called(loss)}({part}, target))"


def _called(loss: str) -> str:
    if hasattr(nn, loss.removesuffix("()")):
        return f"nn.{loss}"
    return f"nn.functional.{loss}" if hasattr(nn.functional, loss) else loss


def _scores(output: Any) -> str:
    """The part of an output that is most likely what the loss takes, as it is written in Python."""
    if isinstance(output, Mapping):
        keys = [key for key, value in output.items() if isinstance(value, Tensor)]
        return f"output[{('logits' if 'logits' in keys else next(iter(keys), 'logits'))!r}]"
    if isinstance(output, tuple | list):
        return f"output[{next((i for i, value in enumerate(output) if isinstance(value, Tensor)), 0)}]"
    held = [name for name, value in getattr(output, "__dict__", {}).items() if isinstance(value, Tensor)]
    return f"output.{'logits' if 'logits' in held else next(iter(held), 'logits')}"


def _types_of_classes(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if target.dtype in (torch.int64, torch.uint8) or target.ndim != output.ndim - 1:
        return None
    why = f"{loss_name(site)} takes class numbers as int64; the targets are {dtype_name(target)}"
    if target.is_floating_point():
        if not _is_whole(target):
            return f"{why} and hold fractions, so they are no classes", "nn.MSELoss() for numbers in place of classes"
        why += " and all whole numbers"
    return why, f"y = y.long() in the Dataset, or target.long() in {place_of_fix(site)}"


def _shapes_of_classes(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if output.ndim < 2 or target.ndim != output.ndim or target.is_floating_point():
        return None
    have = f"{loss_name(site)} takes one class number per row, (rows,); the targets are {tuple(target.shape)}"
    if target.shape[1] == 1:
        return have, f"target.squeeze(1) in {place_of_fix(site)}"
    if target.shape == output.shape:
        return f"{have}, one-hot", f"target.argmax(1) in {place_of_fix(site)}"
    return None


def _range_of_classes(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if not isinstance(site.error, IndexError) or not target.is_cpu or not 0 < target.numel() < MOST_READ:
        return None
    classes, least, most = output.shape[1 if output.ndim > 1 else 0], int(target.min()), int(target.max())
    if most >= classes:
        why = f"the largest target is {most}, and the model has {classes} outputs, for the classes 0 to {classes - 1}"
        shift = "" if least < 1 or most > classes else f", or target - 1 in {place_of_fix(site)}"
        return why, f"a last layer of {most + 1} outputs{shift}"
    padding = f"loss=nn.CrossEntropyLoss(ignore_index={least})"
    return f"the smallest target is {least}; classes are numbered from 0", f"{padding}, if these do not count"


def _types_of_answers(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if target.is_floating_point():
        return None
    why = f"{loss_name(site)} takes targets of the output's type, {dtype_name(output)}; they are {dtype_name(target)}"
    return why, f"y = y.float() in the Dataset, or target.float() in {place_of_fix(site)}"


def _shapes_of_answers(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if output.shape == target.shape:
        return None
    why = f"{loss_name(site)} takes targets of the output's shape {tuple(output.shape)}; they are {tuple(target.shape)}"
    return why, fix_of_shapes(output, target, place_of_fix(site))


def _no_probabilities(site: Site, output: Tensor, target: Tensor) -> tuple[str, str] | None:
    if "between 0 and 1" not in str(site.error) or not output.is_cpu:
        return None
    least, most = float(output.detach().min()), float(output.detach().max())
    if least < 0 or most > 1:
        why = f"BCELoss takes probabilities; the outputs go from {least:.4g} to {most:.4g}"
        return why, "nn.BCEWithLogitsLoss() in place of nn.BCELoss()"
    return "BCELoss takes targets from 0 to 1; these are not", f"targets of 0 and 1 from {place_of_fix(site)}"


def _is_whole(target: Tensor) -> bool:
    return target.numel() < MOST_READ and bool((target == target.floor()).all())
