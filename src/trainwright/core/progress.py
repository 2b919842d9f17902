"""The counters of a run: `Counters`, which `fit` writes, and `Progress`, their read-only view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainwright.core.checks import FormError, check_form, is_amount, is_count, is_flag, is_text


@dataclass(slots=True)
class Counters:
    """All counters of a run. Written by `fit` only, and part of every checkpoint."""

    stage: int = 0
    """The index of this `fit` of the trainer, from 0."""
    epoch: int = 0
    """The current epoch of this stage, from 0, as in `Source.epoch`; records add `earlier_epochs`."""
    begun: bool = False
    """Whether `begin_epoch` of the current epoch has run."""
    batch: int = 0
    """Trained micro-batches of this epoch."""
    updates: int = 0
    """Applied optimizer steps of this stage: the clock of schedules, ends and intervals."""
    rows: int = 0
    """Trained rows of this stage."""
    skipped: int = 0
    """Skipped updates of this stage (fp16 overflow, or `on_nonfinite="skip"`)."""
    earlier_updates: int = 0
    """Applied updates of all earlier stages."""
    earlier_epochs: int = 0
    """Finished epochs of all earlier stages."""
    seconds: float = 0.0
    """Wall-clock time of this stage, over all of its sessions."""
    validated_at: int = -1
    """`updates` at the last validation; -1 before the first."""
    last_boundary: int = 0
    """`updates` at the last boundary. If it is less than `updates`, work that is due since then remains to be done."""
    interrupted_validation: str = ""
    """The boundary whose validation is running: "start", "update", "epoch" or "final" (early end); else empty.

    In a checkpoint: the boundary whose validation was interrupted.
    """
    stopped: str = ""
    """Why the run stopped; empty while it runs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as a dict of plain data."""
        return {_SAVED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore saved counters; FormError if one is missing, of another type, negative or impossible."""
        names = {field.name: _SAVED_NAMES.get(field.name, field.name) for field in fields(self)}
        check_form(tree, **{saved: _FORMS.get(saved, is_count) for saved in names.values()})
        trained = tree["rows"] + tree["updates"] + tree["skipped"]
        if tree["epoch"] > trained or tree["batch"] > trained:
            have = f"{tree['epoch']} epochs and {tree['batch']} batches of the next one"
            raise FormError(f"{have} cannot be of {tree['rows']} rows and {tree['updates']} updates")
        for name, saved in names.items():
            setattr(self, name, tree[saved])


_FORMS: dict[str, Callable[[object], bool]] = {
    "begun": is_flag,
    "seconds": is_amount,
    "validated": lambda value: value == -1 or is_count(value),
    "interrupted_validation": lambda value: value in ("", "start", "update", "epoch", "final"),
    "stopped": is_text,
}
"""Checks of the saved fields that are not counts."""
_SAVED_NAMES = {"validated_at": "validated"}
"""Fields with another name in checkpoints."""


class Progress:
    """A read-only view of the counters, as `trainer.progress`."""

    __slots__ = ("_counters",)

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    @property
    def epoch(self) -> int:
        """The current epoch of this stage, from 0, as in `Source.epoch`; records add `earlier_epochs`."""
        return self._counters.epoch

    @property
    def batch(self) -> int:
        """Trained micro-batches of this epoch."""
        return self._counters.batch

    @property
    def updates(self) -> int:
        """Applied updates of this stage."""
        return self._counters.updates

    @property
    def rows(self) -> int:
        """Trained rows of this stage."""
        return self._counters.rows

    @property
    def skipped(self) -> int:
        """Skipped updates of this stage."""
        return self._counters.skipped

    @property
    def stopped(self) -> str:
        """Why the run stopped; empty while it runs."""
        return self._counters.stopped

    def __repr__(self) -> str:
        return f"Progress(epoch={self.epoch}, batch={self.batch}, updates={self.updates}, rows={self.rows})"
