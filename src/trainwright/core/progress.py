"""Where a run stands: one set of counters with one writer, and the read-only view that everybody else gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainwright.core.checks import FormError, check_form, is_amount, is_count, is_flag, is_text


@dataclass(slots=True)
class Counters:
    """Every counter of a run. Written by `fit` alone; a part of every checkpoint."""

    stage: int = 0
    """Which `fit` of this trainer it is, from 0."""
    epoch: int = 0
    """The epoch in hand, from 0, of this stage."""
    begun: bool = False
    """Whether `begin_epoch` of the epoch in hand has run."""
    batch: int = 0
    """Micro-batches of this epoch that have been trained on."""
    updates: int = 0
    """Updates of this stage in which an optimizer step was applied: the one clock."""
    rows: int = 0
    """Rows of this stage that have been trained on."""
    skipped: int = 0
    """Updates of this stage that were held back (fp16 overflow, or `on_nonfinite="skip"`)."""
    earlier_updates: int = 0
    """Applied updates of all earlier stages."""
    earlier_epochs: int = 0
    """Finished epochs of all earlier stages."""
    seconds: float = 0.0
    """Time this stage has taken, over all of its sessions."""
    validated: int = -1
    """`updates` at the last validation; -1 where there was none."""
    paused: int = 0
    """`updates` at the last pause: where it lies behind, what fell due since is still to be done."""
    pause: str = ""
    """The pause whose validation was broken off: of an "update", an "epoch" or an early end ("final"); else empty."""
    stopped: str = ""
    """Why the run stopped; empty while it goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over the saved counters. FormError where one is missing, of another type, negative or absurd."""
        check_form(tree, **{field.name: _FORMS.get(field.name, is_count) for field in fields(self)})
        trained = tree["rows"] + tree["updates"] + tree["skipped"]
        if tree["epoch"] > trained or tree["batch"] > trained:
            have = f"{tree['epoch']} epochs and {tree['batch']} batches of the next one"
            raise FormError(f"{have} cannot be of {tree['rows']} rows and {tree['updates']} updates")
        for field in fields(self):
            setattr(self, field.name, tree[field.name])


_FORMS: dict[str, Callable[[object], bool]] = {
    "begun": is_flag,
    "seconds": is_amount,
    "validated": lambda value: value == -1 or is_count(value),
    "pause": lambda value: value in ("", "update", "epoch", "final"),
    "stopped": is_text,
}
"""Those that are no counts."""


class Progress:
    """A read-only view of the counters, as `trainer.progress`."""

    __slots__ = ("_counters",)

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    @property
    def epoch(self) -> int:
        """The epoch in hand, from 0, of this stage."""
        return self._counters.epoch

    @property
    def batch(self) -> int:
        """Micro-batches of this epoch that have been trained on."""
        return self._counters.batch

    @property
    def updates(self) -> int:
        """Applied updates of this stage."""
        return self._counters.updates

    @property
    def rows(self) -> int:
        """Rows of this stage that have been trained on."""
        return self._counters.rows

    @property
    def skipped(self) -> int:
        """Updates of this stage that were held back."""
        return self._counters.skipped

    @property
    def stopped(self) -> str:
        """Why the run stopped; empty while it goes on."""
        return self._counters.stopped

    def __repr__(self) -> str:
        return f"Progress(epoch={self.epoch}, batch={self.batch}, updates={self.updates}, rows={self.rows})"
