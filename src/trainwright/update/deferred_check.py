"""The deferred check: the device decides whether an update is applied, and the host reads that some updates later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from trainwright.schedules.table import TableRates
from trainwright.update import nonfinite_policy
from trainwright.update.device_state import AHEAD, AsyncReads, DeviceRates, DeviceScale, DeviceVerdict
from trainwright.update.loss_tracker import Entry
from trainwright.update.nonfinite_policy import PATIENCE, Trace
from trainwright.update.optimizer_steps import SelectedOptimizers
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients


@dataclass(frozen=True, slots=True)
class _Pending:
    """What the host knows of an update whose numbers it has not read yet."""

    update: Update
    entries: list[Entry]
    values: dict[str, float]
    """What probes had returned for its record."""
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
    that update and of all later ones then leave weights and optimizer state as they are, so that the error may come up
    to three updates late and still finds everything as it was before the update that it names.

    Under a loss scale, and with "skip", single updates are left out (`DeviceVerdict`). The number of applied updates,
    which a schedule reads, is then known on the device alone; the host counts every update that it cannot know yet as
    applied, and corrects that when its numbers arrive.
    """

    reports = True
    updates_ahead = AHEAD

    def __init__(self, run: Run, *, update: Callable[[Window], Any], trace: Callable[[], Trace]) -> None:
        super().__init__(run, update=update, trace=trace)
        device = run.owner.device
        self._reads = AsyncReads(device)
        self._found_inf: Tensor | None = None
        """The flag of the update in hand; None where nothing is checked."""
        self._before = (0, 0)
        self._applied = 0
        """Updates of this stage that are known to be applied."""
        self._last = 0
        """The applied updates before the one whose numbers were read last."""
        self._idle = 0
        """Updates in a row that are known to be left out."""
        self._fuses_clipping = False
        """Whether the steps multiply and clip the gradients themselves."""
        self._verdict: DeviceVerdict | None = None
        self._rates: DeviceRates | None = None
        if run.scaler is not None or run.owner.on_nonfinite == "skip":
            scale = DeviceScale(run.scaler, device) if isinstance(run.scaler, LossScaler) else None
            self.scaler = scale
            self._verdict = DeviceVerdict(run.owner.on_nonfinite, device, scale)
            self._loss_flag = torch.zeros((), dtype=torch.float32, device=device)
            rates = run.rates.get(ONLY)
            self._rates = DeviceRates(rates, device) if isinstance(rates, TableRates) else None

    def regroup(self) -> None:
        """Have the steps read the flag of the gradients, and the rates on the device, as they are grouped now."""
        optimizer_steps = self._run.optimizer_steps
        found_inf = optimizer_steps.all.gradients.flag if self._run.checks else None
        if self._verdict is not None:
            found_inf = self._verdict.left_out
        if self._rates is not None:
            self._rates.resize(len(optimizer_steps.rates))
        self._fuses_clipping = all(one.can_fuse_clipping() for one in optimizer_steps.all.steps)
        for one in optimizer_steps.all.steps:
            if found_inf is not None:
                ready_to_mask(one.optimizer)
            rates = None if self._rates is None else self._rates_now
            one.make_step(found_inf, rates, fuses_clipping=self._fuses_clipping)

    def begin(self, window: Window) -> None:
        """Prepare the update of a window: note where it begins, and have its rates lie on the device."""
        super().begin(window)
        counters = self._run.counters
        self._before = (counters.batch, counters.rows)
        if not self._reads.pending:
            self._applied = counters.updates
            if self._verdict is not None:
                self._verdict.reset(counters.updates)
        if self._rates is not None:
            self._rates.reach(self._applied)

    def scale_gradients(self, gradients: Gradients) -> Tensor | None:
        """Return the flag; where clipping is fused the steps multiply, and the norm tells what is not finite."""
        if not self._fuses_clipping:
            return super().scale_gradients(gradients)
        run = self._run
        for one in run.optimizer_steps.all.steps:
            one.factor = self.factor
        self.factor = 1.0
        return gradients.flag if run.checks else None

    def check(self, found_inf: Tensor | None, chosen: SelectedOptimizers) -> bool:
        """Have the device check the loss, the gradients and the norms; the steps that follow read its flag."""
        self.status.applied, self._found_inf = True, found_inf
        if found_inf is None:
            return True
        losses = self._run.tracker.losses
        norms = [one.norm for one in chosen.steps if isinstance(one.norm, Tensor)]
        if self._verdict is None:
            chosen.gradients.check_too([*losses, *norms])
            return True
        chosen.gradients.check_too(norms)
        self._loss_flag.zero_()
        chosen.gradients.check_too(losses, self._loss_flag)
        self._verdict.decide(found_inf, self._loss_flag)
        found_inf.zero_()
        return True

    def report(self, window: Window) -> None:
        """Send the numbers of this update to the host, and report those updates whose numbers have arrived."""
        run, tracker = self._run, self._run.tracker
        norms = {one.name: one.norm for one in run.optimizer_steps.all.steps if one.norm is not None}
        pending = _Pending(
            update=self.reporter.record(
                window, skipped=False, loss=nan, norm=None, values=run.optimizer_steps.numbers()
            ),
            # A graph of autograd would hold the memory of an update until its numbers are read.
            entries=[(name, _detached(value), count, summed) for name, value, count, summed in tracker.collect()],
            values=tracker.values,
            before=self._before,
            after=(run.counters.batch, run.counters.rows),
            captured=0 if run.snapshot is None else run.snapshot.captured,
            norms=tuple(norms),
            window=Window(window.batches, window.rows, move=window.mover),  # a new one: no batch stays on the device
        )
        if self._verdict is not None:
            self._verdict.count()
        self._reads.push(self._numbers(pending.entries, list(norms.values())), partial(self._receive, pending))

    def flush(self) -> None:
        """Wait for the numbers of all updates; the rates of the groups are then those of the last one."""
        pending = self._reads.pending
        self._reads.flush()
        if pending and self._rates is not None:
            self._apply_rates(self._last)

    def _numbers(self, entries: list[Entry], norms: Sequence[float | Tensor]) -> list[float | Tensor]:
        """All numbers of an update: values, their counts, whether it ends the run, whether it is left out, norms."""
        flags: list[float | Tensor] = [0.0 if self._found_inf is None else self._found_inf, 0.0]
        if self._verdict is not None:
            flags = [self._verdict.ends_run, self._verdict.left_out]
        return [*[entry[1] for entry in entries], *[entry[2] for entry in entries], *flags, *norms]

    def _rates_now(self) -> list[Tensor]:
        assert self._rates is not None
        assert self._verdict is not None
        return self._rates.at(self._verdict.applied)

    def _receive(self, pending: _Pending, numbers: list[float]) -> None:
        """Take over the numbers of an update that have arrived: add them up, count it, report it, or raise."""
        run, tracker, size = self._run, self._run.tracker, 2 * len(pending.entries)
        in_hand = tracker.values
        tracker.take_for(pending.entries, numbers, pending.values)
        ends_run, left_out, *norms = numbers[size:]
        if ends_run:
            self._raise(pending, norms)
        rates = pending.update.lrs if self._rates is None else tuple(self._rates.of(self._applied))
        self._last = self._applied
        self._count(left_out=left_out != 0)
        if self._idle >= PATIENCE:
            self._rewind(pending.after)
            raise nonfinite_policy.nothing_applied(f"{PATIENCE} updates in a row", skipped=True)
        named = dict(zip(pending.norms, norms, strict=True))
        update = replace(
            pending.update,
            update=run.counters.earlier_updates + self._applied,
            skipped=left_out != 0,
            lr=rates[0],
            lrs=rates,
            grad_norm=named.get(run.optimizer_steps.all.steps[0].name),
        )
        grad_norms = {f"grad_norm_{name}": norm for name, norm in named.items()} if run.optimizer_steps.named else {}
        self.reporter.send(update, {"loss": tracker.loss, **tracker.values, **grad_norms})
        tracker.values = in_hand

    def _count(self, *, left_out: bool) -> None:
        """Correct the counters of the host, which took the update for applied."""
        counters = self._run.counters
        if not left_out:
            self._applied, self._idle = self._applied + 1, 0
            return
        counters.updates -= 1
        counters.skipped += 1
        self._idle += 1

    def _raise(self, pending: _Pending, norms: list[float]) -> None:
        """Restore what has moved since before an update that is not finite, and raise."""
        run, counters = self._run, self._run.counters
        if run.snapshot is not None:
            run.snapshot.restore(ago=run.snapshot.captured - pending.captured)
        run.gradients.lower_flags()
        self._rewind(pending.before)
        run.tracker.window = pending.window
        raise nonfinite_policy.error(
            update=counters.earlier_updates + counters.updates + 1,
            loss=run.tracker.loss,
            lr=pending.update.lr if self._rates is None else self._rates.of(self._applied)[0],
            norm=norms[0] if norms else None,
            counted=run.tracker.counted,
            trace=self.trace,
        )

    def _rewind(self, place: tuple[int, int]) -> None:
        """Set counters and rates to the updates whose numbers were read, and drop those after them."""
        run, counters = self._run, self._run.counters
        self._reads.drop()
        run.tracker.collect()
        counters.updates, (counters.batch, counters.rows) = self._applied, place
        self._apply_rates(counters.updates)

    def _apply_rates(self, updates: int) -> None:
        for rates in self._run.rates.values():
            rates.apply(updates)


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value
