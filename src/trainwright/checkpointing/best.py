"""Judges which checkpoints of a run are among the best, by one number; every process of a group judges alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any
from warnings import warn

from trainwright.core.checks import FormError, check_form, is_count, is_none_or, is_number, is_text
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import did_you_mean

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint


class Judged:
    """The `top` best so far of the number that `Checkpoint(best=...)` names, the very best first."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.top: list[One] = []

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Whether the number is among the `top` best so far.

        NaN never is, nor the worst infinity; a tie beats nothing. SettingError where there is no such number.
        """
        name = self.settings.best
        if name is None:
            return False
        if name not in metrics:
            what = f"Checkpoint(best={name!r}): there is no number of that name.{did_you_mean(name, metrics)}"
            raise SettingError(message(what, want=f"one of {', '.join(sorted(metrics))}"))
        found = One(float(metrics[name]), epoch, update)
        self.top = [judged for judged in self.top if judged.update != update]
        place = bisect_right([self._rank(judged.value) for judged in self.top], self._rank(found.value))
        if place >= self.settings.top or not self._rank(found.value) < inf:
            return False
        self.top.insert(place, found)
        del self.top[self.settings.top :]
        return True

    def state_dict(self) -> dict[str, Any]:
        """What was judged best so far."""
        top = [{"value": judged.value, "epoch": judged.epoch, "update": judged.update} for judged in self.top]
        return {"best": self.settings.best, "mode": self.mode, "top": top}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was judged best; a best of another number is forgotten, with a warning."""
        check_form(tree, best=is_none_or(is_text), mode=is_text, top=lambda top: type(top) is list)
        for one in tree["top"]:
            check_form(one, value=is_number, epoch=is_count, update=is_count)
            if len(one) > 3:
                raise FormError(f"one of 'top' has {', '.join(map(repr, one))}")
        if (tree["best"], tree["mode"]) == (self.settings.best, self.mode):
            self.top = [One(**judged) for judged in tree["top"]][: self.settings.top]
            return
        self.top = []
        if tree["best"] is not None and self.settings.best is not None:
            now = f"{self.settings.best} ({self.mode})"
            warn(
                f"the best so far was judged on {tree['best']} ({tree['mode']}); on {now} it starts anew", stacklevel=3
            )

    @property
    def mode(self) -> str:
        """Whether less or more of the number is better."""
        return self.settings.mode or "min"

    def _rank(self, value: float) -> float:
        return -value if self.mode == "max" else value


@dataclass(frozen=True, slots=True)
class One:
    """A number that was judged, and where."""

    value: float
    epoch: int
    update: int
