"""State of the deferred check on the device: loss scale, verdict, applied updates, rates; and asynchronous reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.device import widest_float
from trainwright.core.torch_private import update_scale
from trainwright.precision.base import LossScale
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.table import TableSchedule
from trainwright.update.nonfinite_policy import Policy

AHEAD = 3
"""Updates that may be queued on the device before the host waits for the oldest of them."""
ROWS = 512
"""Rows of a table of rates that are on the device at a time."""


class DeviceScale(LossScale):
    """A loss scale that is adapted on the device; its values are those of `LossScaler` on the host."""

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self._host = scaler
        self.settings = scaler.settings
        self._scale = torch.zeros((), dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._send()

    @property
    def scale(self) -> Tensor:
        """The factor of every `grad_tensor` of `backward`: a 0-dim tensor."""
        return self._scale

    def inv_scale(self) -> Any:
        """Return the factor that unscales gradients, a 0-dim tensor in the widest dtype of the device."""
        return self._scale.to(widest_float(self._scale.device)).reciprocal()

    def adapt(self, overflowed: Any) -> None:
        """Lower the scale where the 0-dim tensor `overflowed` is 1; else raise it after enough updates without one."""
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
        """1.0 where the scale cannot be lowered any more, a 0-dim tensor."""
        return (self._scale <= self.settings.min_scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; read from the device, between two updates."""
        scale, good = host_reads.read([self._scale, self._good])
        self._host.load_state_dict({"scale": scale, "good": good})
        return self._host.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved scale."""
        self._host.load_state_dict(tree)
        self._send()

    @property
    def value(self) -> float:
        """The scale; read from the device."""
        return float(self.state_dict()["scale"])

    def _send(self) -> None:
        state = self._host.state_dict()
        self._scale.fill_(state["scale"])
        self._good.fill_(state["good"])


class DeviceVerdict:
    """`nonfinite_policy.verdict_of` as tensor arithmetic: the same table in zeros and ones, without a read."""

    def __init__(self, policy: Policy, device: torch.device, scale: DeviceScale | None) -> None:
        self._policy, self._scale = policy, scale
        self.left_out = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 where the update in progress is left out: the `found_inf` of the fused steps."""
        self.ends_run = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 from the update on that ends the run."""
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        """Updates of this stage that were applied."""

    def update_flags(self, gradient: Tensor, loss: Tensor) -> None:
        """Set the flags for an update; `gradient`, `loss`: 1.0 where that is not finite. The table of `verdict_of`."""
        if self._scale is None:
            own = gradient if self._policy == "ignore" else torch.maximum(gradient, loss)
            overflow = torch.zeros_like(gradient)
        else:
            # An overflow of a scaled gradient under a finite loss belongs to the scale, unless that is at its floor.
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
        """Count the update in progress where it is applied."""
        self.applied.add_((self.left_out == 0).to(torch.int64))

    def reset(self, updates: int) -> None:
        """Set the count of the host, and lower the flags."""
        self.applied.fill_(updates)
        self.ends_run.zero_()
        self.left_out.zero_()


class DeviceLRTable:
    """The rates of a schedule as a table on the device, of which each update takes the row of the applied updates."""

    def __init__(self, schedule: TableSchedule, device: torch.device) -> None:
        self._schedule, self._device = schedule, device
        self._table = torch.zeros(0, 0, device=device)
        self._version = schedule.version
        self._begin: int | None = None
        """The first row of the table, as the host knows it; None where it was not sent yet."""
        self._first = torch.zeros((), dtype=torch.int64, device=device)

    def resize(self, groups: int) -> None:
        """Set how many groups there are; with others the table is sent again when it is needed next."""
        if self._table.shape[1] != groups:
            self._table, self._begin = torch.zeros(ROWS, groups, dtype=torch.float32, device=self._device), None

    def of(self, updates: int) -> list[float]:
        """Return the rates of the update that follows `updates` applied ones, on the host."""
        return self._schedule.at(updates)

    def reach(self, applied: int) -> None:
        """Have the table hold the rates of the update to come; `applied`: updates that the host knows to be applied."""
        # The device has applied at most AHEAD updates more.
        stale = self._version != self._schedule.version
        if stale or self._begin is None or not self._begin <= applied < self._begin + ROWS - AHEAD:
            self._send(applied)

    def at(self, applied: Tensor) -> list[Tensor]:
        """Return the rate of each group after so many applied updates, 0-dim tensors."""
        row = (applied - self._first).reshape(1)
        return list(self._table.index_select(0, row).reshape(-1).unbind())

    def _send(self, first: int) -> None:
        """Send the rows from `first` on, into the memory of those before them."""
        table = torch.tensor([self._schedule.at(first + row) for row in range(ROWS)], dtype=torch.float32)
        if self._device.type == "cuda":
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)
        self._first.fill_(first)
        self._begin, self._version = first, self._schedule.version


class AsyncReads:
    """Reads numbers of the device through a ring of pinned host memory, in order, each delivered once.

    All numbers of an update are in one copy. The host never waits for a copy in progress, but for that of the
    update `ahead` before the newest: the one wait of the loop, which also bounds how far the host runs ahead.
    """

    def __init__(self, device: torch.device, *, ahead: int = AHEAD) -> None:
        self._device, self._ahead = device, ahead
        self._slots: list[Tensor] = [torch.empty(0)] * (ahead + 1)
        self._turn = 0
        self._under_way: deque[tuple[Any, Tensor, list[Any], Callable[[list[float]], None]]] = deque()

    def push(self, values: Sequence[float | Tensor], deliver: Callable[[list[float]], None]) -> None:
        """Start to read scalars of the device or the host; `deliver` gets them as floats, in order, on arrival."""
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
        """Wait for all reads in progress, and deliver their numbers."""
        while self._under_way:
            self._deliver()

    def drop(self) -> None:
        """Drop all that was not delivered."""
        self._under_way.clear()

    def _slot(self, size: int) -> Tensor:
        """Return host memory that no copy in progress writes to; pinned, if the device is CUDA."""
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
    """Copy numbers from a device into host memory without a wait; return the event of their arrival."""
    slot.copy_(numbers, non_blocking=True)
    if numbers.device.type != "cuda":
        return None
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(numbers.device))  # another device may be the current one
    return arrived


_READ: Any = object()
"""In place of a number that is being read."""


def _is_under_way(value: float | Tensor, device: torch.device) -> TypeGuard[Tensor]:
    """Return whether only the device has a number; with another device, the host knows a tensor on the CPU."""
    return isinstance(value, Tensor) and not (value.is_cpu and device.type != "cpu")
