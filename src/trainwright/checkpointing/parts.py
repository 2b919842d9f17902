"""The state of a run as one tree, `{part: state}`: gathered for a checkpoint, and restored strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainwright.checkpointing.format import dry_save
from trainwright.checkpointing.load import DamagedError
from trainwright.checkpointing.optimizer_state import PARAMETERS, optimizer_states, parameters_of_optimizers
from trainwright.checkpointing.tree import flatten
from trainwright.checkpointing.weights import shape_difference
from trainwright.core.checks import FormError
from trainwright.core.errors import CheckpointError, TrainwrightError, first_line, listed
from trainwright.optim.named import keep_dtypes
from trainwright.protocols import Stateful, Tree

_ANEW = "leave resume out, and give Checkpoint() a new directory, to begin a new run"
NEVER_FRESH = {
    "model": 'load_weights("weights.safetensors", model) before a new run',
    "data": "resume_data=False, for other data",
    **dict.fromkeys(("progress", "totals", "random"), _ANEW),
}
"""Part -> fix, for the parts that `resume_fresh` must not name."""
_ALWAYS = frozenset({"model", "progress", "totals", "data", "state", "random"})
"""The parts of every run."""


def gather(parts: Mapping[str, Stateful]) -> dict[str, Tree]:
    """Return the state of every part, and the parameter names of each optimizer."""
    tree = {name: part.state_dict() for name, part in parts.items()}
    return tree | {PARAMETERS: parameters_of_optimizers(parts, tree)}


def check_savable(tree: Mapping[str, Tree], metrics: Mapping[str, Any]) -> None:
    """Raise CheckpointError, with the name of the value, for a state that cannot be saved; for metrics with a fix."""
    try:
        dry_save(tree)
    except CheckpointError:
        _check_metrics(metrics)
        raise


def check(parts: Mapping[str, Stateful], tree: Mapping[str, Tree], *, origin: str, fresh: Sequence[str] = ()) -> None:
    """Raise CheckpointError if a part is missing or not used, or if the tensors of a module differ.

    `fresh`: the parts of `resume_fresh`, which the fix repeats.
    """
    if parts.keys() != tree.keys():
        raise _other_parts(parts, tree, origin=origin, fresh=fresh)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _check_tensors(name, part, tree[name], origin=origin)


def _other_parts(
    parts: Mapping[str, Stateful], tree: Mapping[str, Tree], *, origin: str, fresh: Sequence[str]
) -> CheckpointError:
    """Return the error for a checkpoint with other parts, with the line that starts them fresh."""
    missing, unused = sorted(parts.keys() - tree.keys()), sorted(map(str, tree.keys() - parts.keys()))
    if lost := _ALWAYS.intersection(missing):
        return DamagedError(f"{origin} is damaged: it has no part {min(lost)!r}", origin)
    line, rebuild = fresh_line([*fresh, *missing, *unused]), "build the Trainer as when it was saved"
    return CheckpointError(
        f"{origin} does not fit this Trainer",
        have=f"missing {missing}, not used {unused}",
        want=f"the parts {sorted(parts)}",
        fix=f"{line}, which starts them anew; or {rebuild}" if line else rebuild,
        where=False,
    )


def fresh_line(names: Sequence[str]) -> str:
    """Return the line of code that starts these parts fresh; empty if one of them cannot start fresh."""
    if not NEVER_FRESH.keys().isdisjoint(names):
        return ""
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"fit(..., resume_fresh=({quoted}{',' * (len(names) == 1)}))"


def restore(parts: Mapping[str, Stateful], tree: dict[str, Tree], *, origin: str) -> list[str]:
    """Load the state of every part: model and progress first, random last. Return the reports of the parts.

    Called after `check`. CheckpointError if the state of a part has another form.
    """
    reports = []
    # Progress before the schedule: its plan needs the lengths of finished epochs.
    for name in sorted(parts, key=lambda name: (name != "model", name != "progress", name == "random")):
        part = parts[name]
        try:
            report = part.load_state_dict(tree[name])
        except TrainwrightError:
            raise  # it has a fix already
        except _LOAD_ERRORS as error:
            raise _load_error(name, error, origin=origin) from error
        if isinstance(report, str) and report:
            reports.append(report)
    if _dtypes_match(parts, tree):
        for _, optimizer, states, key in optimizer_states(parts, tree):
            keep_dtypes(optimizer, states[key])
    return reports


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse metric objects with attributes that cannot be saved; the error shows the methods to write."""
    for name, metric in metrics.items():
        if hasattr(metric, "compute") and not hasattr(metric, "state_dict"):
            _check_attributes(name, metric)


def _check_attributes(name: str, metric: Any) -> None:
    """Refuse a metric object with an attribute that cannot be saved; the error shows the methods to write."""
    attributes = vars(metric)
    wrong = {attribute: why for attribute, value in attributes.items() if (why := _defect(attribute, value))}
    if not wrong:
        return
    kind = type(metric).__name__
    counted = ", ".join(f"{attribute!r}: self.{attribute}" for attribute in attributes if attribute not in wrong)
    raise CheckpointError(
        f"metric {name!r} cannot be saved with the run: its attribute {next(iter(wrong.values()))}",
        want=f"attributes that are plain data, or a {kind} with state_dict and load_state_dict",
        fix=f"in {kind}: def state_dict(self): return {{{counted}}}   # without {', '.join(wrong)}\n"
        "        and def load_state_dict(self, tree): vars(self).update(tree)",
    )


def _defect(attribute: str, value: Any) -> str:
    """Return why the value of an attribute cannot be saved; "" if it can."""
    try:
        flatten({attribute: value})
    except CheckpointError as error:
        return str(error).partition("\n")[0].removesuffix(": it cannot be saved")
    return ""


_LOAD_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""Errors that `load_state_dict` may raise for a state of another form."""


def _load_error(name: str, error: Exception, *, origin: str) -> CheckpointError:
    """Return the error for a part that cannot load its state: damaged, or saved with other settings."""
    why = first_line(error)
    if isinstance(error, KeyError):
        why = f"its saved state has no {error}"
    elif isinstance(error, ValueError):
        why = str(error)
    text = f"{origin}: part {name!r} cannot be loaded: {why}"
    is_of_user = isinstance(error, ValueError) and not isinstance(error, FormError)
    if is_of_user and name not in ("progress", "totals", "random"):  # these have no settings
        return CheckpointError(text, where=False)
    return DamagedError(text, origin)


def _dtypes_match(parts: Mapping[str, Stateful], tree: Mapping[str, Tree]) -> bool:
    """Return whether all parameters have their saved dtypes."""
    roots = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = [(tree[name].get(key), own) for name, root in roots.items() for key, own in root.named_parameters()]
    return all(saved.dtype == own.dtype for saved, own in named if isinstance(saved, Tensor))


def _check_tensors(name: str, module: nn.Module, saved: Any, *, origin: str) -> None:
    """Raise CheckpointError if the saved tensors of a module differ in name or shape."""
    if not isinstance(saved, Mapping):
        raise DamagedError(f"{origin} is damaged: part {name!r} is a {type(saved).__name__}", origin)
    own = module.state_dict()
    shapes = [shape_difference(key, saved[key], value) for key, value in own.items() if key in saved]
    wrong = [text for text in shapes if text]
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if wrong or missing or unexpected:
        raise _other_module(name, wrong, missing=missing, unexpected=unexpected, origin=origin)


def _other_module(
    name: str, wrong: list[str], *, missing: list[str], unexpected: list[str], origin: str
) -> CheckpointError:
    """Return the error for a module whose tensors differ from the saved ones."""
    named = {"of another shape": wrong, "missing in the checkpoint": missing, f"not in the {name}": unexpected}
    return CheckpointError(
        f"{origin} is from another {name}: {len(wrong)} tensors differ in shape, "
        f"{len(missing)} are missing, {len(unexpected)} are not in the model",
        have="; ".join(f"{what}: {listed(keys, 5)}" for what, keys in named.items() if keys),
        want="the model as it was saved",
        fix=f"build the {name} as when it was saved, or leave resume out and give Checkpoint() a new directory",
    )
