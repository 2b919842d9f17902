"""TensorBoard: the numbers of a run as event files, continued in the same directory after a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainwright.core.checks import local_path
from trainwright.core.durations import Duration, Seconds, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.records import Result, Saved, Update, Validation
from trainwright.core.suggestions import suggests
from trainwright.protocols import Observer

if TYPE_CHECKING:
    from trainwright.observers.probes import ModelStatistics
    from trainwright.observers.throughput import Speed


@suggests
class TensorBoardLogger(Observer):
    """Writes losses, learning rates, validations and speeds to event files: `tensorboard --logdir DIRECTORY`.

    An update has `loss`, `lr`, `grad_norm` where it is measured, and each named number; a validation or an epoch has
    `val_...`, and the means of training since the epoch began as `epoch/...`. The step of all of them is the update,
    counted over all stages. A directory shows one run: a resumed one hides events after the update that it resumes
    from, and a new one hides earlier events.

    Args:
        directory: Where the event files are written.
        every: The interval, in updates or seconds, at which an update is written; others are not recorded.

    Raises:
        SettingError: Without the package tensorboard.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: Duration = Updates(10)) -> None:  # noqa: B008
        if not isinstance(every, Updates | Seconds):
            what = f"TensorBoardLogger(every={every!r})"
            raise SettingError(what, want="Updates(n) or Seconds(n)", fix="TensorBoardLogger(..., every=Updates(10))")
        if find_spec("tensorboard") is None:
            fix = 'pip install "trainwright[tensorboard]"'
            raise SettingError("TensorBoardLogger(...) without the package tensorboard", fix=fix)
        self.directory, self.every = local_path(directory, "TensorBoardLogger({})"), every
        self._hides: int | None = 0
        """The first step of earlier files to hide; None for none."""
        self._writer: Any = None
        self._validated = -1

    def resume_at(self, update: int, skipped: int = 0, *, continues: bool = True) -> None:
        """Hide events after `update`: the run repeats these updates."""
        self._close()
        self._hides = update + 1

    def on_fit_start(self, plan: Plan) -> None:
        """Close the file of an earlier run; the first number opens a new one."""
        self._close()
        self._validated = -1

    def on_update(self, update: Update) -> None:
        """Write an update that was applied; a skipped one has no step of its own."""
        if update.skipped:
            return
        numbers = {"loss": update.loss, "lr": update.lr, **update.values}
        if update.grad_norm is not None:
            numbers["grad_norm"] = update.grad_norm
        if update.loss_scale is not None:
            numbers["loss_scale"] = update.loss_scale
        if len(update.lrs) > 1:
            numbers |= {f"lr/group_{group}": rate for group, rate in enumerate(update.lrs)}
        self._write(update.update, numbers)

    def on_validate(self, record: Validation) -> None:
        """Write a validation; the one at an early end as `final/...`, apart from the curves that a resume continues."""
        self._validated = record.update
        rates = ("epoch", "update", "lr")
        means = {name: value for name, value in record.metrics.items() if name not in rates and name[:3] != "lr_"}
        numbers = {name if name.startswith("val_") else f"epoch/{name}": value for name, value in means.items()}
        if record.final:
            numbers = {f"final/{name}": value for name, value in means.items()}
        self._write(record.update, numbers | ({"skipped": record.skipped} if record.skipped else {}))
        self._writer.flush()

    def on_epoch(self, record: Validation) -> None:
        """Write an epoch, unless the validation at its end was written."""
        if record.update != self._validated:
            self.on_validate(record)

    def on_speed(self, speed: Speed) -> None:
        """Write the speed of training."""
        names = ("rows_per_second", "updates_per_second", "waiting", "mfu")
        speeds = {f"speed/{name}": value for name in names if (value := getattr(speed, name)) is not None}
        self._write(speed.update, speeds | {f"memory/{kind}": size for kind, size in speed.memory.items()})

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Write statistics of weights, gradients and an update, by parameter."""
        names = ("weight_norm", "weight_max", "weight_zeros", "grad_norm", "grad_max", "grad_zeros", "update_ratio")
        values = [(kind, name, getattr(one, kind)) for name, one in statistics.parameters.items() for kind in names]
        self._write(statistics.update, {f"{kind}/{name}": value for kind, name, value in values if value is not None})

    def on_save(self, saved: Saved) -> None:
        """Flush: a run that resumes from this checkpoint finds the events before it."""
        if self._writer is not None:
            self._writer.flush()

    def on_fit_end(self, result: Result) -> None:
        """Close the file."""
        self._close()

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.directory), purge_step=self._hides, flush_secs=10)
            self._hides = None
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
