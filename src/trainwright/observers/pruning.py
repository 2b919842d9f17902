"""Pruning: ends the run of a search's trial that does worse than others have done at the same point (Optuna)."""

from __future__ import annotations

from typing import Any, Literal

from trainwright.core.errors import SettingError
from trainwright.core.records import Validation
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.protocols import Observer

_BETTER = {
    **dict.fromkeys(("loss", "mae", "rmse"), "MINIMIZE"),
    **dict.fromkeys(("accuracy", "f1", "r2"), "MAXIMIZE"),
}
"""Which way numbers are better whose names end so."""


@suggests
class Pruning(Observer):
    """Reports a number to an Optuna trial after each epoch, and raises `optuna.TrialPruned` where the pruner says so.

    It changes no number of the run: it ends it, as any error of yours would, and the error goes on through `fit` to
    the study, which takes the trial as pruned. `monitor` is a number of the history's rows, "val_accuracy". Trials are
    compared at the same step: `per="epoch"` counts finished epochs; `per="update"` reports after every validation, by
    its update, for trials that all make the same updates. NaN is reported as it is, and pruned.
    """

    def __init__(self, trial: Any, monitor: str, *, per: Literal["epoch", "update"] = "epoch") -> None:
        if not callable(getattr(trial, "report", None)) or not callable(getattr(trial, "should_prune", None)):
            fix = 'def objective(trial): ... observers=[Pruning(trial, "val_accuracy")]'
            raise SettingError(f"Pruning({trial!r}, ...)", want="the trial that Optuna gave", fix=fix)
        if not isinstance(monitor, str) or not monitor:
            raise SettingError(f"Pruning(trial, {monitor!r})", want="the name of a number", fix='"val_loss"')
        if per not in ("epoch", "update"):
            raise SettingError(f"Pruning(per={per!r})", want='"epoch" or "update"')
        _check_direction(trial, monitor)
        self.trial, self.monitor, self.per = trial, monitor, per
        self._last: int | None = None

    def on_epoch(self, record: Validation) -> None:
        """Report after an epoch."""
        if self.per == "epoch" and not record.final:
            self._report(record, record.epoch)

    def on_validate(self, record: Validation) -> None:
        """Report after a validation."""
        if self.per == "update" and not record.final:
            self._report(record, record.update)

    def _report(self, record: Validation, step: int) -> None:
        value = record.metrics.get(self.monitor)
        if value is None:
            self._check_there_is_one(record)
            return
        if step == self._last:  # a planned end inside an epoch
            return
        from optuna import TrialPruned

        self._last = step
        self.trial.report(float(value), step)
        if self.trial.should_prune():
            raise TrialPruned(f"{self.monitor} {value:.4g} at {self.per} {step}")

    def _check_there_is_one(self, record: Validation) -> None:
        """Refuse a name that no row will have; an epoch that was not validated has none of `val_...`."""
        if self.monitor.startswith("val_") and not any(name.startswith("val_") for name in record.metrics):
            return
        have = ", ".join(record.metrics)
        what = f"Pruning watches {self.monitor!r}, which is not reported.{did_you_mean(self.monitor, record.metrics)}"
        raise SettingError(what, have=have, where=False)


def _check_direction(trial: Any, monitor: str) -> None:
    """Refuse a number that the study would read the wrong way round: the best trials would be pruned."""
    direction = getattr(getattr(getattr(trial, "study", None), "direction", None), "name", None)
    better = next((better for name, better in _BETTER.items() if monitor.lower().endswith(name)), direction)
    if direction is not None and better != direction:
        what = f"Pruning watches {monitor!r} in a study that is to {direction.lower()}: it would prune the best"
        want = "a number that is better the same way as the objective's"
        fix = 'tune(..., mode="max") and Pruning(trial, "val_accuracy"); or mode="min" and "val_loss"'
        raise SettingError(what, want=want, fix=fix)
