"""The deferred check: the device decides whether an update is applied; the host reads the result some updates later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from trainwright.core import host_reads
from trainwright.core.device import widest_float
from trainwright.core.records import Update
from trainwright.core.torch_private import buffer_dict, update_scale
from trainwright.core.trees import inside
from trainwright.modules.modes import running_statistics
from trainwright.optim.fused import ready_to_mask, why_not_masked
from trainwright.optim.named import ONLY
from trainwright.precision.base import LossScale
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.bound import BoundSchedule
from trainwright.schedules.table import TableSchedule
from trainwright.update import nonfinite_policy
from trainwright.update.nonfinite_policy import PATIENCE, Policy
from trainwright.update.optimizer_steps import SelectedOptimizers
from trainwright.update.running_means import Entry, Terms, count_of, mean_of, values_of
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients
    from trainwright.update.trainer_like import TrainerLike


AHEAD = 3
"""The most updates queued on the device; then the host waits for the oldest one."""
ROWS = 512
"""The number of rows of the rate table that are on the device at a time."""
ASYNC_DEVICES = {"cuda", "meta"}
"""Device types on which a read waits for all earlier kernels."""


class DeviceScale(LossScale):
    """A loss scale that is adapted on the device, with the same values as a `LossScaler` on the host."""

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self._host = scaler
        self.settings = scaler.settings
        self._scale = torch.zeros((), dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._send()

    @property
    def scale(self) -> Tensor:
        """The factor of the gradients of `backward`: a 0-dim tensor."""
        return self._scale

    def inv_scale(self) -> Any:
        """Return the factor that unscales gradients, a 0-dim tensor in the widest dtype of the device."""
        return self._scale.to(widest_float(self._scale.device)).reciprocal()

    def adapt(self, overflowed: Any) -> None:
        """Lower the scale if the 0-dim tensor `overflowed` is 1; else raise it after enough updates without one."""
        settings = self.settings
        update_scale(
            self._scale,
            self._good,
            overflowed,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
        )
        self._scale.clamp_(min=settings.min_scale)

    @property
    def at_floor(self) -> Any:
        """A 0-dim tensor: 1.0 if the scale cannot be lowered further, else 0.0."""
        return (self._scale <= self.settings.min_scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, read from the device; called between two updates."""
        scale, good = host_reads.read([self._scale, self._good])
        self._host.load_state_dict({"scale": scale, "good": good})
        return self._host.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load a saved scale."""
        self._host.load_state_dict(tree)
        self._send()

    @property
    def known(self) -> float:
        """The scale that was last sent to or read from the device."""
        return self._host.value

    @property
    def value(self) -> float:
        """The scale; read from the device."""
        return float(self.state_dict()["scale"])

    def _send(self) -> None:
        state = self._host.state_dict()
        self._scale.fill_(state["scale"])
        self._good.fill_(state["good"])


class DeviceVerdict:
    """`nonfinite_policy.verdict_of` as tensor arithmetic on flags of 0.0 and 1.0, without a read from the device."""

    def __init__(self, policy: Policy, device: torch.device, scale: DeviceScale | None) -> None:
        self._policy, self._scale = policy, scale
        self.left_out = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 if the current update is skipped: the `found_inf` of the fused steps."""
        self.ends_run = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 from the update that ends the run."""
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        """The number of applied updates of this stage."""

    def update_flags(self, gradient: Tensor, loss: Tensor) -> None:
        """Set the flags for an update, as `verdict_of`. `gradient`, `loss`: 1.0 if they are not finite, else 0.0."""
        if self._scale is None:
            own = gradient if self._policy == "ignore" else torch.maximum(gradient, loss)
            overflow = torch.zeros_like(gradient)
        else:
            # An overflow of a scaled gradient with a finite loss is due to the scale, unless that is at its minimum.
            overflow = gradient * (1.0 - loss) * (1.0 - self._scale.at_floor)
            own = torch.maximum(gradient, loss) * (1.0 - overflow)
            self._scale.adapt(gradient)
        if self._policy == "raise":
            self.ends_run.copy_(torch.maximum(self.ends_run, own))
            self.left_out.copy_(torch.maximum(overflow, self.ends_run))
        elif self._policy == "skip":
            self.left_out.copy_(torch.maximum(overflow, own))
        else:
            self.left_out.copy_(overflow)

    def count(self) -> None:
        """Count the current update, if it is applied."""
        self.applied.add_((self.left_out == 0).to(torch.int64))

    def reset(self, updates: int) -> None:
        """Set the number of applied updates to that of the host, and lower the flags."""
        self.applied.fill_(updates)
        self.ends_run.zero_()
        self.left_out.zero_()


class DeviceLRTable:
    """The rates of a schedule as a table on the device; each update uses the row for the number of applied updates."""

    def __init__(self, schedule: TableSchedule, device: torch.device) -> None:
        self._schedule, self._device = schedule, device
        self._table = torch.zeros(0, 0, device=device)
        self._version = schedule.version
        self._begin: int | None = None
        """The update of the first row of the table, on the host; None if no table was sent yet."""
        self._first = torch.zeros((), dtype=torch.int64, device=device)

    def resize(self, groups: int) -> None:
        """Set the number of parameter groups; after a change, the table is sent again when it is next needed."""
        if self._table.shape[1] != groups:
            self._table, self._begin = torch.zeros(ROWS, groups, dtype=torch.float32, device=self._device), None

    def of(self, updates: int) -> list[float]:
        """Return the rates for the update after `updates` applied ones, on the host."""
        return self._schedule.at(updates)

    def reach(self, applied: int) -> None:
        """Send the rates of the next update if the table lacks them; `applied`: applied updates known to the host."""
        # The device may have applied up to AHEAD more updates.
        stale = self._version != self._schedule.version
        if stale or self._begin is None or not self._begin <= applied < self._begin + ROWS - AHEAD:
            self._send(applied)

    def at(self, applied: Tensor) -> list[Tensor]:
        """Return the rate of each group after `applied` updates, as 0-dim tensors."""
        row = (applied - self._first).reshape(1)
        return list(self._table.index_select(0, row).reshape(-1).unbind())

    def _send(self, first: int) -> None:
        """Send the rows from `first` on, into the same device memory."""
        table = torch.tensor([self._schedule.at(first + row) for row in range(ROWS)], dtype=torch.float32)
        if self._device.type == "cuda":
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)
        self._first.fill_(first)
        self._begin, self._version = first, self._schedule.version


class AsyncReads:
    """Asynchronous reads from the device through a ring of pinned host buffers, delivered in order.

    All numbers of an update are read by one copy. The host only waits for the copy of the update `ahead` before the
    newest one. This is the only wait of the loop, and limits how far the host runs ahead.
    """

    def __init__(self, device: torch.device, *, ahead: int = AHEAD) -> None:
        self._device, self._ahead = device, ahead
        self._slots: list[Tensor] = [torch.empty(0)] * (ahead + 1)
        self._turn = 0
        self._under_way: deque[tuple[Any, Tensor, list[Any], Callable[[list[float]], None]]] = deque()

    def push(self, values: Sequence[float | Tensor], deliver: Callable[[list[float]], None]) -> None:
        """Start a read of scalars on the device or the host; on arrival, `deliver` gets them as floats, in order."""
        there = [value for value in values if _is_under_way(value, self._device)]
        kind = widest_float(self._device)
        stacked = torch.stack([one.detach().reshape(()).to(self._device, kind) for one in there]) if there else None
        slot = self._slot(0 if stacked is None else len(stacked))
        arrived = None if stacked is None else fetch(stacked, slot)
        known = [_READ if _is_under_way(value, self._device) else float(value) for value in values]
        self._under_way.append((arrived, slot, known, deliver))
        while len(self._under_way) > self._ahead:
            self._deliver()

    @property
    def has_unread(self) -> bool:
        """Whether a read is in progress."""
        return bool(self._under_way)

    def flush(self) -> None:
        """Wait for all reads in progress and deliver their numbers."""
        while self._under_way:
            self._deliver()

    def drop(self) -> None:
        """Drop all numbers that were not delivered."""
        self._under_way.clear()

    def _slot(self, size: int) -> Tensor:
        """Return a host buffer that no copy in progress writes to; pinned if the device is CUDA."""
        self._turn = (self._turn + 1) % len(self._slots)
        if self._slots[self._turn].numel() < size:
            pinned = self._device.type == "cuda"
            kind = widest_float(self._device)
            self._slots[self._turn] = torch.empty(max(size, 8), dtype=kind, pin_memory=pinned)
        return self._slots[self._turn][:size]

    def _deliver(self) -> None:
        arrived, slot, known, deliver = self._under_way.popleft()
        if arrived is not None:
            arrived.synchronize()
        numbers = iter(slot.tolist())
        deliver([next(numbers) if value is _READ else value for value in known])


def fetch(numbers: Tensor, slot: Tensor) -> Any:
    """Start a copy of numbers from a device into host memory; return the CUDA event of its end, or None."""
    slot.copy_(numbers, non_blocking=True)
    if numbers.device.type != "cuda":
        return None
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(numbers.device))  # another device may be the current one
    return arrived


_READ: Any = object()
"""Marks a number that is being read from the device."""


def _is_under_way(value: float | Tensor, device: torch.device) -> TypeGuard[Tensor]:
    """Return whether a number must be read from the device; a CPU tensor counts only if the device is the CPU."""
    return isinstance(value, Tensor) and not (value.is_cpu and device.type != "cpu")


@dataclass(frozen=True, slots=True)
class _Pending:
    """An update whose numbers the host has not read yet."""

    update: Update
    entries: list[Entry]
    terms: Terms
    """The numbers that are already known: those of probes."""
    before: tuple[int, int]
    """Micro-batches and rows before the update."""
    after: tuple[int, int]
    """Micro-batches and rows after the update."""
    captured: int
    """The number of captures of the snapshot at the time of the update."""
    norms: tuple[str, ...]
    """The optimizers whose norms are among the numbers."""
    window: Window
    """The host micro-batches, for an error that inspects them."""


class DeferredCheck(UpdateStrategy):
    """Checks each update on the device, and reads its numbers up to three updates later, without a wait in between.

    A non-finite loss, gradient or norm raises a flag on the device, torch's `found_inf`. The fused kernels of this
    update and of all later ones then change neither weights nor optimizer state. So the error may be raised up to three
    updates late, with the state from before the update that it names.
    """

    updates_ahead = AHEAD

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        self.reports = True
        self._reads = AsyncReads(run.trainer.device)
        self._found_inf: Tensor | None = None
        """The flag of the current update; None if nothing is checked."""
        self._before = (0, 0)
        self._applied = 0
        """The number of updates of this stage that are known to be applied."""
        self._scale: float | None = None
        """The loss scale of the update whose numbers arrive next; None without observers or without a scale."""
        self._fuses_clipping = False
        """Whether the kernels of the steps unscale and clip the gradients."""

    def regroup(self) -> None:
        """Bind the steps to the flag and to the rates on the device, for the current parameter groups."""
        steps = self._run.optimizer_steps
        mask, lrs = self.mask(), self.device_lrs()
        self._fuses_clipping = all(step.can_fuse_clipping() for step in steps.all.steps)
        for step in steps.all.steps:
            if mask is not None:
                ready_to_mask(step.optimizer)
            step.bind_kernels(mask, lrs, fuses_clipping=self._fuses_clipping)

    def mask(self) -> Tensor | None:
        """Return the tensor that makes a step a no-op if it is 1; None if nothing is checked."""
        return self._run.gradients.flag if self._run.checks else None

    def device_lrs(self) -> Callable[[], list[Tensor]] | None:
        """Return a function that returns the rates of the groups on the device; None: use those in the groups."""
        return None

    def begin(self, window: Window) -> None:
        """Begin the update of a window."""
        super().begin(window)
        counters = self._run.counters
        self._before = (counters.batch, counters.rows)
        if not self._reads.has_unread:
            self._applied = counters.updates

    def unscale_and_check(self, gradients: Gradients) -> Tensor | None:
        """Return the flag. With fused clipping, the steps unscale, and the norm is checked instead of the gradients."""
        if not self._fuses_clipping:
            return super().unscale_and_check(gradients)
        run = self._run
        for step in run.optimizer_steps.all.steps:
            step.factor = self.pending_factor
        self.pending_factor = 1.0
        return gradients.flag if run.checks else None

    def check(self, found_inf: Tensor | None, chosen: SelectedOptimizers) -> bool:
        """Check loss, gradients and norms on the device; always True, since the steps read the flag."""
        self.status.applied, self._found_inf = True, found_inf
        if found_inf is not None:
            norms = [step.norm for step in chosen.steps if isinstance(step.norm, Tensor)]
            self.check_on_device(found_inf, chosen.gradients, norms=norms)
        return True

    def check_on_device(self, found_inf: Tensor, gradients: Gradients, *, norms: list[Tensor]) -> None:
        """Raise the flag, which covers the gradients already, if the loss or a norm is not finite."""
        gradients.check_too([*self._run.tracker.losses, *norms])

    def adapt_scale(self, scaler: LossScale) -> None:
        """No-op: the device adapts the loss scale together with its verdict."""

    def report(self, window: Window) -> None:
        """Start the read of the numbers of this update, and report the updates whose numbers have arrived.

        With the policy "raise", NonFiniteError for an update that was not finite.
        """
        run, tracker, optimizers = self._run, self._run.tracker, self._run.optimizer_steps
        norms = {one.name: one.norm for one in optimizers.all.steps if one.norm is not None}
        pending = _Pending(
            update=self.reporter.record(window, skipped=False, loss=nan, norm=None, values=optimizers.numbers()),
            # Detached: an autograd graph would keep the memory of an update until its numbers are read.
            entries=[(name, _detached(value), count, summed) for name, value, count, summed in tracker.pop_unread()],
            terms=tracker.terms,
            before=self._before,
            after=(run.counters.batch, run.counters.rows),
            captured=0 if run.snapshot is None else run.snapshot.captured,
            norms=tuple(norms),
            window=Window(window.batches, window.rows, move=window.mover),  # a new one, without batches on the device
        )
        values, counts = [entry[1] for entry in pending.entries], [entry[2] for entry in pending.entries]
        numbers = [*values, *counts, *self.flags(), *norms.values()]
        self._reads.push(numbers, partial(self._receive, pending))

    def flags(self) -> list[float | Tensor]:
        """Return whether the current update ends the run, whether it is skipped, and the scale of the next update."""
        return [0.0 if self._found_inf is None else self._found_inf, 0.0, 0.0]

    def flush(self) -> None:
        """Wait for the numbers of all updates, and report them."""
        self._reads.flush()

    def _receive(self, pending: _Pending, numbers: list[float]) -> None:
        """Add the arrived numbers of an update, count and report it, or raise NonFiniteError."""
        run, terms = self._run, pending.terms
        run.tracker.add_read(pending.entries, numbers, terms)
        ends_run, left_out, next_scale, *norms = numbers[2 * len(pending.entries) :]
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
            loss_scale=self._scale,
        )
        self._scale = None if self._scale is None else next_scale
        grad_norms = {f"grad_norm_{name}": norm for name, norm in named.items()} if run.optimizer_steps.named else {}
        self.reporter.send(update, {"loss": mean_of(terms.get("loss", [])), **values_of(terms), **grad_norms})

    def lrs_of(self, pending: _Pending) -> tuple[float, ...]:
        """Return the rates of an update whose numbers have arrived; called before it is counted."""
        return pending.update.lrs

    def _count(self, pending: _Pending, *, left_out: bool) -> None:
        """Count an update whose numbers have arrived."""
        self._applied += 1

    def _raise(self, pending: _Pending, norms: list[float]) -> None:
        """Restore the state from before a non-finite update, and raise NonFiniteError."""
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
        """Reset counters and rates to the updates whose numbers were read; drop later updates."""
        run, counters = self._run, self._run.counters
        self._reads.drop()
        run.tracker.pop_unread()
        counters.updates, (counters.batch, counters.rows) = self._applied, place
        self.apply_schedules(counters.updates)

    def apply_schedules(self, updates: int) -> None:
        """Set the rates of the groups to those after `updates` applied updates."""
        for schedule in self._run.schedules.values():
            schedule.apply(updates)


class DeferredSkip(DeferredCheck):
    """A deferred check with a loss scale or `on_nonfinite="skip"`: the device skips single updates.

    Only the device knows the number of applied updates, which determines the rate. The host counts each pending update
    as applied, and corrects the count when its numbers arrive.
    """

    scaler: DeviceScale | None
    """The loss scale, on the device; None without one."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        device = run.trainer.device
        scaler = DeviceScale(run.host_scaler, device) if isinstance(run.host_scaler, LossScaler) else None
        self.scaler = scaler  # pyright: ignore[reportIncompatibleVariableOverride]
        self._verdict = DeviceVerdict(run.trainer.on_nonfinite, device, self.scaler)
        self._loss_flag = torch.zeros((), dtype=torch.float32, device=device)
        schedule = run.schedules.get(ONLY)
        self._lr_table = DeviceLRTable(schedule, device) if isinstance(schedule, TableSchedule) else None
        """The rates on the device; None without a schedule."""
        self._last = 0
        """The applied updates before the last update whose numbers were read."""
        self._idle = 0
        """The number of consecutive updates known to be skipped."""

    def mask(self) -> Tensor:
        """Return the tensor that is 1 if the current update is skipped."""
        return self._verdict.left_out

    def device_lrs(self) -> Callable[[], list[Tensor]] | None:
        """Return a function that returns the rates for the number of applied updates on the device."""
        table = self._lr_table
        if table is None:
            return None
        table.resize(len(self._run.optimizer_steps.lrs))
        return lambda: table.at(self._verdict.applied)

    def begin(self, window: Window) -> None:
        """Begin the update of a window; make sure that its rates are on the device."""
        super().begin(window)
        if not self._reads.has_unread:
            self._verdict.reset(self._applied)
            if self._scale is None and self.scaler is not None and self.reporter.is_needed:
                self._scale = self.scaler.known
        if self._lr_table is not None:
            self._lr_table.reach(self._applied)

    def check_on_device(self, found_inf: Tensor, gradients: Gradients, *, norms: list[Tensor]) -> None:
        """Decide on the device whether the update is applied, by the flags of the gradients and of the loss."""
        gradients.check_too(norms)
        self._loss_flag.zero_()
        gradients.check_too(self._run.tracker.losses, self._loss_flag)
        self._verdict.update_flags(found_inf, self._loss_flag)
        found_inf.zero_()

    def report(self, window: Window) -> None:
        """Count the update on the device, then report as `DeferredCheck` does."""
        self._verdict.count()
        super().report(window)

    def flags(self) -> list[float | Tensor]:
        """Return whether the current update ends the run, whether it is skipped, and the scale of the next update."""
        scale = self.scaler.scale if self.scaler is not None and self.reporter.is_needed else 0.0
        return [self._verdict.ends_run, self._verdict.left_out, scale]

    def flush(self) -> None:
        """Wait for the numbers of all updates, then set the rates of the groups to those of the last update."""
        has_unread = self._reads.has_unread
        super().flush()
        if has_unread:
            self.apply_schedules(self._last)

    def lrs_of(self, pending: _Pending) -> tuple[float, ...]:
        """Return the rates for the number of applied updates before this one."""
        return pending.update.lrs if self._lr_table is None else tuple(self._lr_table.of(self._applied))

    def _count(self, pending: _Pending, *, left_out: bool) -> None:
        """Count an update whose numbers have arrived; if it was skipped, correct the counters of the host."""
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


def why_immediate(
    trainer: TrainerLike, *, checks: bool, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> tuple[str, ...]:
    """Return why the numbers of each update must be read before its step; empty if the check can be deferred.

    `checks`: whether anything is checked. `scaler`: the loss scale. `schedules`: the bound schedules by optimizer name.
    """
    if trainer.device.type not in ASYNC_DEVICES:
        return ("a read waits for nothing here",)
    return tuple(_why_not_deferred(trainer, checks=checks, scaler=scaler, schedules=schedules))


def _why_not_deferred(
    trainer: TrainerLike, *, checks: bool, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> list[str]:
    """Return the reasons why an asynchronous device must be read before each step."""
    hooks, why = trainer._hooks, list[str]()
    if trainer.world.size > 1:
        why.append("the ranks check an update together")
    if trainer.on_error == "save":
        why.append('on_error="save" saves the update before an error')
    if hooks.has_custom_update or hooks.overrides_compute_gradients:
        why.append("an `update` of your own reads what it has done")
    follows = trainer.precision is not None and trainer.precision.follows_updates
    if checks and (follows or hooks.after_update is not None):
        why.append("`after_update` runs after applied updates alone")
    if checks:
        why += [reason for one in trainer.optimizers.values() if (reason := why_not_masked(one))]
    if scaler is not None or trainer.on_nonfinite == "skip":
        why += _why_skips_are_not_deferred(trainer, scaler, schedules)
    return why


def _why_skips_are_not_deferred(
    trainer: TrainerLike, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> Iterator[str]:
    """Yield the reasons why the host must know immediately that an update is skipped, by the loss scale or "skip"."""
    hooks, skips = trainer._hooks, trainer.on_nonfinite == "skip"
    if scaler is not None and type(scaler) is not LossScaler:
        yield "a loss scale of your own"
    if trainer.average is not None:
        yield "an average is taken of applied updates alone"
    if running_statistics(trainer.model):
        yield "BatchNorm statistics are restored with an update that is skipped"
    elif skips and has_buffers(trainer):
        yield "buffers are restored with an update that is skipped"
    if skips and (hooks.overrides_training_step or trainer.state):
        yield '"skip" restores `self.state`'
    plain = all(
        name == ONLY and type(one) is TableSchedule and not one.cycles for name, one in (schedules or {}).items()
    )
    if not plain:
        yield "the schedule sets more than rates, or has a state of its own"


def has_buffers(trainer: TrainerLike) -> bool:
    """Return whether the model or the loss has any buffer."""
    roots = [one for one in (trainer.model, trainer.loss) if isinstance(one, nn.Module)]
    modules = (module for root in roots for module in inside(root))
    return any(tensor is not None for module in modules for tensor in buffer_dict(module).values())
