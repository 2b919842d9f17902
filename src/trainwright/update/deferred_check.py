"""The deferred check: the device decides whether an update is applied, and the host reads that some updates later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core.records import Update
from trainwright.optim.fused import ready_to_mask
from trainwright.optim.named import ONLY
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.table import TableSchedule
from trainwright.update import nonfinite_policy
from trainwright.update.device_state import AHEAD, AsyncReads, DeviceLRTable, DeviceScale, DeviceVerdict
from trainwright.update.nonfinite_policy import PATIENCE
from trainwright.update.optimizer_steps import SelectedOptimizers
from trainwright.update.running_means import Entry, Terms, count_of, mean_of, values_of
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients


@dataclass(frozen=True, slots=True)
class _Pending:
    """An update whose numbers the host has not read yet."""

    update: Update
    entries: list[Entry]
    terms: Terms
    """Its numbers that are known already: those of probes."""
    before: tuple[int, int]
    """Micro-batches and rows before it."""
    after: tuple[int, int]
    """Micro-batches and rows up to its end."""
    captured: int
    """How often the snapshot had been captured when it was made."""
    norms: tuple[str, ...]
    """The optimizers whose norms are among its numbers."""
    window: Window
    """Its micro-batches as the data gave them, for an error that looks at them."""


class DeferredCheck(UpdateStrategy):
    """Lets the device check each update, and reads its numbers up to three updates later, without a wait in between.

    A loss, gradient or norm that is not finite raises a flag on the device, torch's `found_inf`. The fused kernels of
    that update and of all later ones then leave weights and optimizer state as they are. So the error may come up to
    three updates late: everything is as it was before the update that it names.
    """

    reports = True
    updates_ahead = AHEAD

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        self._reads = AsyncReads(run.trainer.device)
        self._found_inf: Tensor | None = None
        """The flag of the update in progress; None where nothing is checked."""
        self._before = (0, 0)
        self._applied = 0
        """Updates of this stage that are known to be applied."""
        self._fuses_clipping = False
        """Whether the steps multiply and clip the gradients themselves."""

    def regroup(self) -> None:
        """Make the steps read the flag, and rates of the device, by the parameter groups of now."""
        steps = self._run.optimizer_steps
        mask, lrs = self.mask(), self.device_lrs()
        self._fuses_clipping = all(step.can_fuse_clipping() for step in steps.all.steps)
        for step in steps.all.steps:
            if mask is not None:
                ready_to_mask(step.optimizer)
            step.make_step(mask, lrs, fuses_clipping=self._fuses_clipping)

    def mask(self) -> Tensor | None:
        """Return the tensor that is 1 where a step changes nothing; None where nothing is checked."""
        return self._run.gradients.flag if self._run.checks else None

    def device_lrs(self) -> Callable[[], list[Tensor]] | None:
        """Return a function that returns the rates of the groups on the device; None: the groups have them."""
        return None

    def begin(self, window: Window) -> None:
        """Begin the update of a window."""
        super().begin(window)
        counters = self._run.counters
        self._before = (counters.batch, counters.rows)
        if not self._reads.has_unread:
            self._applied = counters.updates

    def unscale_and_check(self, gradients: Gradients) -> Tensor | None:
        """Return the flag. Where clipping is fused the steps multiply, and the norm is checked for the gradients."""
        if not self._fuses_clipping:
            return super().unscale_and_check(gradients)
        run = self._run
        for step in run.optimizer_steps.all.steps:
            step.factor = self.pending_factor
        self.pending_factor = 1.0
        return gradients.flag if run.checks else None

    def check(self, found_inf: Tensor | None, chosen: SelectedOptimizers) -> bool:
        """Have the device check the loss, the gradients and the norms; the steps that follow read its flag."""
        self.status.applied, self._found_inf = True, found_inf
        if found_inf is not None:
            norms = [step.norm for step in chosen.steps if isinstance(step.norm, Tensor)]
            self.check_on_device(found_inf, chosen.gradients, norms=norms)
        return True

    def check_on_device(self, found_inf: Tensor, gradients: Gradients, *, norms: list[Tensor]) -> None:
        """Raise the flag where the loss or a norm is not finite; that of the gradients is raised already."""
        gradients.check_too([*self._run.tracker.losses, *norms])

    def report(self, window: Window) -> None:
        """Send the numbers of this update to the host, and report those updates whose numbers have arrived."""
        run, tracker, optimizers = self._run, self._run.tracker, self._run.optimizer_steps
        norms = {one.name: one.norm for one in optimizers.all.steps if one.norm is not None}
        pending = _Pending(
            update=self.reporter.record(window, skipped=False, loss=nan, norm=None, values=optimizers.numbers()),
            # A graph of autograd would hold the memory of an update until its numbers are read.
            entries=[(name, _detached(value), count, summed) for name, value, count, summed in tracker.pop_unread()],
            terms=tracker.terms,
            before=self._before,
            after=(run.counters.batch, run.counters.rows),
            captured=0 if run.snapshot is None else run.snapshot.captured,
            norms=tuple(norms),
            window=Window(window.batches, window.rows, move=window.mover),  # a new one: no batch stays on the device
        )
        values, counts = [entry[1] for entry in pending.entries], [entry[2] for entry in pending.entries]
        numbers = [*values, *counts, *self.flags(), *norms.values()]
        self._reads.push(numbers, partial(self._receive, pending))

    def flags(self) -> list[float | Tensor]:
        """Return whether the update in progress ends the run, and whether it is left out."""
        return [0.0 if self._found_inf is None else self._found_inf, 0.0]

    def flush(self) -> None:
        """Wait for the numbers of all updates."""
        self._reads.flush()

    def _receive(self, pending: _Pending, numbers: list[float]) -> None:
        """Take over the numbers of an update that have arrived: add them up, count it, report it, or raise."""
        run, terms = self._run, pending.terms
        run.tracker.add_read(pending.entries, numbers, terms)
        ends_run, left_out, *norms = numbers[2 * len(pending.entries) :]
        if ends_run:
            self._raise(pending, norms)
        lrs = self.lrs_of(pending)
        self._count(pending, left_out=left_out != 0)
        named = dict(zip(pending.norms, norms, strict=True))
        update = replace(
            pending.update,
            update=run.counters.earlier_updates + self._applied,
            skipped=left_out != 0,
            lr=lrs[0],
            lrs=lrs,
            grad_norm=named.get(run.optimizer_steps.all.steps[0].name),
        )
        grad_norms = {f"grad_norm_{name}": norm for name, norm in named.items()} if run.optimizer_steps.named else {}
        self.reporter.send(update, {"loss": mean_of(terms.get("loss", [])), **values_of(terms), **grad_norms})

    def lrs_of(self, pending: _Pending) -> tuple[float, ...]:
        """Return the rates of an update whose numbers have arrived, before it is counted."""
        return pending.update.lrs

    def _count(self, pending: _Pending, *, left_out: bool) -> None:
        """Count an update whose numbers have arrived."""
        self._applied += 1

    def _raise(self, pending: _Pending, norms: list[float]) -> None:
        """Restore what was changed since before an update that is not finite, and raise."""
        run, counters = self._run, self._run.counters
        if run.snapshot is not None:
            run.snapshot.restore(ago=run.snapshot.captured - pending.captured)
        run.gradients.lower_flags()
        self.rewind(pending.before)
        run.tracker.window = pending.window
        raise nonfinite_policy.error(
            update=counters.earlier_updates + counters.updates + 1,
            loss=mean_of(pending.terms.get("loss", [])),
            lr=self.lrs_of(pending)[0],
            norm=norms[0] if norms else None,
            counted=count_of(pending.terms),
            find_origin=self._run.find_origin,
        )

    def rewind(self, place: tuple[int, int]) -> None:
        """Set counters and rates to the updates whose numbers were read, and drop those after them."""
        run, counters = self._run, self._run.counters
        self._reads.drop()
        run.tracker.pop_unread()
        counters.updates, (counters.batch, counters.rows) = self._applied, place
        self.apply_schedules(counters.updates)

    def apply_schedules(self, updates: int) -> None:
        """Set the rates of the groups to those after so many applied updates."""
        for schedule in self._run.schedules.values():
            schedule.apply(updates)


class DeferredSkip(DeferredCheck):
    """A deferred check under a loss scale or `on_nonfinite="skip"`: the device leaves out single updates.

    Only the device knows the number of applied updates, which a schedule reads. The host counts every update that it
    does not know yet as applied, and corrects that when its numbers arrive.
    """

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        device = run.trainer.device
        self.scaler = scale = DeviceScale(run.scaler, device) if isinstance(run.scaler, LossScaler) else None
        self._verdict = DeviceVerdict(run.trainer.on_nonfinite, device, scale)
        self._loss_flag = torch.zeros((), dtype=torch.float32, device=device)
        schedule = run.schedules.get(ONLY)
        self._lr_table = DeviceLRTable(schedule, device) if isinstance(schedule, TableSchedule) else None
        """The rates on the device; None without a schedule."""
        self._last = 0
        """The applied updates before the one whose numbers were read last."""
        self._idle = 0
        """Updates in a row that are known to be left out."""

    def mask(self) -> Tensor:
        """Return the tensor that is 1 where the update in progress is left out."""
        return self._verdict.left_out

    def device_lrs(self) -> Callable[[], list[Tensor]] | None:
        """Return a function that returns the rates after so many applied updates as the device knows."""
        table = self._lr_table
        if table is None:
            return None
        table.resize(len(self._run.optimizer_steps.lrs))
        return lambda: table.at(self._verdict.applied)

    def begin(self, window: Window) -> None:
        """Begin the update of a window; its rates are on the device."""
        super().begin(window)
        if not self._reads.has_unread:
            self._verdict.reset(self._applied)
        if self._lr_table is not None:
            self._lr_table.reach(self._applied)

    def check_on_device(self, found_inf: Tensor, gradients: Gradients, *, norms: list[Tensor]) -> None:
        """Decide on the device whether the update is applied: by the flag of the gradients, and that of the loss."""
        gradients.check_too(norms)
        self._loss_flag.zero_()
        gradients.check_too(self._run.tracker.losses, self._loss_flag)
        self._verdict.update_flags(found_inf, self._loss_flag)
        found_inf.zero_()

    def report(self, window: Window) -> None:
        """Count the update on the device, then report as a deferred check does."""
        self._verdict.count()
        super().report(window)

    def flags(self) -> list[float | Tensor]:
        """Return whether the update in progress ends the run, and whether it is left out."""
        return [self._verdict.ends_run, self._verdict.left_out]

    def flush(self) -> None:
        """Wait for the numbers of all updates; the rates of the groups are then those of the last one."""
        has_unread = self._reads.has_unread
        super().flush()
        if has_unread:
            self.apply_schedules(self._last)

    def lrs_of(self, pending: _Pending) -> tuple[float, ...]:
        """Return the rates that follow as many applied updates as there were before this one."""
        return pending.update.lrs if self._lr_table is None else tuple(self._lr_table.of(self._applied))

    def _count(self, pending: _Pending, *, left_out: bool) -> None:
        """Count an update whose numbers have arrived; correct the host, which has counted it as applied."""
        counters = self._run.counters
        self._last = self._applied
        if not left_out:
            self._applied, self._idle = self._applied + 1, 0
            return
        counters.updates -= 1
        counters.skipped += 1
        self._idle += 1
        if self._idle >= PATIENCE:
            self.rewind(pending.after)
            raise nonfinite_policy.nothing_applied(f"{PATIENCE} updates in a row", skipped=True)


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value
