"""Which checkpoints stay: the last `keep`, and the `top` best by the monitored number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any
from warnings import warn

from trainwright.core.checks import FormError, check_form, is_count, is_none_or, is_number, is_text
from trainwright.core.errors import SettingError
from trainwright.core.monitor import Mode, rank
from trainwright.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Measured:
    """A value of the monitored number, and where it was measured."""

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
        """Take in the numbers of an update; return whether the monitored one is among the `top` best so far.

        NaN never is, nor the worst infinity; a tie is no better. SettingError where there is no such number.
        """
        if self.monitor is None:
            return False
        if self.monitor not in metrics:
            near = did_you_mean(self.monitor, metrics)
            what = f"Checkpoint(best={self.monitor!r}): there is no number of that name.{near}"
            raise SettingError(what, want=f"one of {', '.join(sorted(metrics))}")
        measured = Measured(float(metrics[self.monitor]), epoch, update)
        key = rank(measured.value, self.mode)
        self.top = [one for one in self.top if one.update != update]
        place = bisect_right([rank(one.value, self.mode) for one in self.top], key)
        if place >= self._size or key == inf:
            return False
        self.top.insert(place, measured)
        del self.top[self._size :]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return {"best": self.monitor, "mode": self.mode, "top": [asdict(one) for one in self.top]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the best values so far; those of another number are dropped, with a warning."""
        check_form(tree, best=is_none_or(is_text), mode=is_text, top=lambda top: type(top) is list)
        for one in tree["top"]:
            check_form(one, value=is_number, epoch=is_count, update=is_count)
            if len(one) > 3:
                raise FormError(f"one of 'top' has {', '.join(map(repr, one))}")
        if (tree["best"], tree["mode"]) == (self.monitor, self.mode):
            self.top = [Measured(**one) for one in tree["top"]][: self._size]
            return
        self.top = []
        if tree["best"] is not None and self.monitor is not None:
            now = f"{self.monitor} ({self.mode})"
            warn(
                f"the best so far was judged on {tree['best']} ({tree['mode']}); on {now} it starts anew", stacklevel=3
            )


@dataclass(frozen=True, slots=True, eq=False)
class Retention:
    """The rule that one save goes by: the last `keep`, the `top` best complete ones, and what was judged best."""

    keep: int | None
    """None: all of them."""
    top: int
    judged: frozenset[int]
    """Updates that were judged best when the save began, their checkpoints complete or not."""

    def removable(self, complete: Mapping[int, float]) -> list[int]:
        """Return the updates of the checkpoints to remove; `complete`: the rank of each one's number, by update."""
        last = sorted(complete, reverse=True)[: self.keep]
        ranked = sorted((key, update) for update, key in complete.items() if key < inf)
        best = [update for _, update in ranked[: self.top]]
        return sorted(set(complete) - {*last, *best, *self.judged})
