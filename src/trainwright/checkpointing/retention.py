"""Retention: the last `keep` checkpoints, and the `top` best by the monitored number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal
from warnings import warn

from trainwright.core.checks import check_form, is_count, is_none_or, is_number, is_text
from trainwright.core.monitor import Mode, require_monitor, sort_key

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Measured:
    """A value of the monitored number, with the epoch and the update of its measurement."""

    value: float
    epoch: int
    update: int


class BestTracker:
    """The `top` best values so far of the number that `Checkpoint(best=...)` names, the very best first."""

    def __init__(self, settings: Checkpoint) -> None:
        self.monitor = settings.best
        self.mode: Mode = settings.mode or "min"
        self.top: list[Measured] = []
        self._size = settings.top

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Rank the numbers of an update; return whether the monitored one is among the `top` best so far.

        NaN and the worst infinity never are; a tie is no better. SettingError if there is no such number.
        """
        if self.monitor is None:
            return False
        require_monitor(self.monitor, metrics, f"Checkpoint(best={self.monitor!r})")
        measured = Measured(float(metrics[self.monitor]), epoch, update)
        others = [earlier for earlier in self.top if earlier.update != update]
        ranked = sorted([*others, measured], key=self._sort_key)  # stable: the earlier one of two that are equal
        self.top = [candidate for candidate in ranked if self._sort_key(candidate) < inf][: self._size]
        return measured in self.top

    def _sort_key(self, measured: Measured) -> float:
        return sort_key(measured.value, self.mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return {"best": self.monitor, "mode": self.mode, "top": [asdict(measured) for measured in self.top]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the best values so far; drop those of another number, with a warning."""
        check_form(tree, best=is_none_or(is_text), mode=is_text, top=lambda top: type(top) is list)
        for fields in tree["top"]:
            check_form(fields, value=is_number, epoch=is_count, update=is_count)
        top = [Measured(**fields) for fields in tree["top"]]
        is_same = (tree["best"], tree["mode"]) == (self.monitor, self.mode)
        self.top = top[: self._size] if is_same else []
        if not is_same and tree["best"] is not None and self.monitor is not None:
            saved, now = f"{tree['best']} ({tree['mode']})", f"{self.monitor} ({self.mode})"
            warn(f"the best so far was judged on {saved}; on {now} it starts anew", stacklevel=3)


def removable(
    complete: Mapping[int, float], *, keep: int | Literal["all"], top: int, best: Collection[int]
) -> list[int]:
    """Return the updates of the checkpoints to remove: all but the last `keep`, the `top` best, and those of `best`.

    `complete`: update -> sort key of its number; `best`: updates with the best values so far; their
    checkpoints may be incomplete.
    """
    last = sorted(complete, reverse=True)[: None if keep == "all" else keep]
    ranked = sorted((key, update) for update, key in complete.items() if key < inf)
    return sorted(set(complete) - {*last, *(update for _, update in ranked[:top]), *best})
