"""`UpdateReporter`: sends a record of plain floats for each update to the observers that override `on_update`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.durations import Epochs, Seconds, TimeTrigger, Trigger, check_duration
from trainwright.core.errors import SettingError, message
from trainwright.core.progress import Counters
from trainwright.core.records import Update
from trainwright.metrics.reduce import Sums, reduce_to_rank0
from trainwright.protocols import Observer
from trainwright.update.trainer_like import TrainerLike
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.update.optimizer_steps import OptimizerSteps


class UpdateReporter:
    """Reports updates to the observers that override `on_update`, each at its interval, on rank 0.

    Each rank knows the numbers that user hooks return for its own rows only. Such records are held until the ranks
    synchronize, about once a second, and are then reported with the numbers of all ranks. If the run ends with an error
    before, they are reported with the numbers of rank 0, and the Result has a note on it.
    """

    def __init__(self, trainer: TrainerLike, optimizer_steps: OptimizerSteps) -> None:
        self._trainer, self._counters, self._optimizer_steps = trainer, trainer._counters, optimizer_steps
        hooks = trainer._hooks
        self._holds = trainer.world.size > 1 and (hooks.may_log_any_name or hooks.after_update is not None)
        """Whether records are held until the ranks synchronize."""
        self._held: list[tuple[Update, Sums]] = []
        """Held records, each with sum and count of every number of this rank."""
        self.loss_scale: float | Tensor | None = None
        """The loss scale of the current update; None without one."""
        self.note = ""
        """A note on the updates that were reported with the numbers of rank 0 only; else empty."""
        self._notify = [
            (observer.on_update, _trigger(observer, trainer._counters))
            for observer in trainer.observers
            if type(observer).on_update is not Observer.on_update
        ]
        here = len(self._notify) > 0
        self.is_needed = any(trainer.world.sum_numbers(here)) if self._holds else here
        """Whether there is an observer; on any rank, if ranks exchange numbers."""

    def report(self, window: Window, *, skipped: bool) -> None:
        """Report the update of a window to the observers whose interval has passed."""
        if self._holds:
            self._held.append((self._update(window, skipped=skipped), self._numbers()))
            return
        update = None
        for notify, trigger in self._notify if self._trainer.is_main else ():
            if trigger is None or trigger.fires(self._counters, epoch_ended=False):
                update = self._update(window, skipped=skipped) if update is None else update
                notify(update)

    def report_held(self) -> None:
        """Report the held records with the numbers of all ranks. A collective."""
        held, self._held = self._held, []
        if not self._holds:
            return
        reduce_to_rank0(self._trainer.world, [sums for _, sums in held])
        for update, sums in held:
            self.send(update, sums.means())

    def report_held_alone(self) -> None:
        """Report the held records with the numbers of this rank, after an error, when ranks no longer synchronize."""
        held, self._held = self._held, []
        if not held or not self._notify or not self._trainer.is_main:
            return
        first, last = held[0][0].update, held[-1][0].update
        which = f"update {first} was" if first == last else f"updates {first} to {last} were"
        self.note = f"{which} reported with the numbers of rank 0 alone: the run ended before the ranks synchronized"
        for update, sums in held:
            self.send(update, sums.means())

    def send(self, update: Update, numbers: dict[str, float]) -> None:
        """Send a record with additional `numbers` to the observers whose interval has passed."""
        loss = numbers.pop("loss", update.loss)
        complete = replace(update, loss=loss, values={**update.values, **numbers})
        for notify, trigger in self._notify if self._trainer.is_main else ():
            if trigger is None or trigger.fires_at(update.update - self._counters.earlier_updates):
                notify(complete)

    def _numbers(self) -> Sums:
        hooks, tracker = self._trainer._hooks, self._trainer._tracker
        with_loss = tracker.has_loss and (hooks.has_custom_update or hooks.overrides_compute_gradients)
        return tracker.counted_values(with_loss=with_loss)

    def _update(self, window: Window, *, skipped: bool) -> Update:
        tracker, optimizer_steps = self._trainer._tracker, self._optimizer_steps
        if tracker.unread:  # numbers that `after_update` has logged
            tracker.read()
        norm = optimizer_steps.all.steps[0].norm
        named = optimizer_steps.numbers() | optimizer_steps.norms() if optimizer_steps.named else {}
        norm = norm if isinstance(norm, float) else None
        values = {**tracker.values, **named}
        return self.record(window, skipped=skipped, loss=tracker.loss, norm=norm, values=values)

    def record(
        self, window: Window, *, skipped: bool, loss: float, norm: float | None, values: dict[str, float]
    ) -> Update:
        """Return the record of the update of a window."""
        counters, lrs, scale = self._counters, self._optimizer_steps.lrs, self.loss_scale
        if isinstance(scale, Tensor):
            [scale] = host_reads.read([scale]) if scale.is_cpu else [None]  # observers cause no read from a device
        return Update(
            update=counters.earlier_updates + counters.updates,
            epoch=counters.earlier_epochs + counters.epoch,
            loss=loss,
            lr=lrs[0],
            lrs=lrs,
            grad_norm=norm,
            rows=window.all_rows,
            skipped=skipped,
            values=values,
            loss_scale=scale,
        )


def check_every(observer: Observer) -> None:
    """Raise SettingError for an `every` that is not valid for `on_update`, or of an observer without `on_update`."""
    every, name = observer.every, type(observer).__name__
    if every is None:
        return
    if isinstance(every, Epochs):
        what = f"{name}.every={every}: on_update comes after updates"
        raise SettingError(message(what, want="Updates(n) or Seconds(n)", fix="override on_epoch instead"))
    check_duration(every, f"{name}.every")
    if type(observer).on_update is Observer.on_update:
        what = f"{name}.every={every}, and {name} has no on_update that it would hold for"
        raise SettingError(message(what, fix="leave `every` out, or write def on_update(self, update)"))


def _trigger(observer: Observer, counters: Counters) -> Trigger | TimeTrigger | None:
    """Return the trigger for reports to an observer; None if every update is reported."""
    check_every(observer)
    if observer.every is None:
        return None
    if isinstance(observer.every, Seconds):
        return TimeTrigger(observer.every)
    return Trigger(observer.every, counters, of="every")
