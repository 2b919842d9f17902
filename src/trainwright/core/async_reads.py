"""Numbers that a device has computed, read when they have arrived: some updates later, without a wait in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from trainwright.core.device import widest_float

AHEAD = 3
"""Updates that may be under way on the device before the host waits for the oldest of them."""

Deliver = Callable[[list[float]], None]


class Lagging:
    """A ring of host memory that the numbers of updates arrive in, in order; each is delivered once.

    All numbers of an update travel in one copy. The host never waits for one that is still under way, but for the
    update `ahead` before the newest: the one wait of the loop, which also keeps the host from running far ahead.
    """

    def __init__(self, device: torch.device, *, ahead: int = AHEAD) -> None:
        self._device, self._ahead = device, ahead
        self._slots: list[Tensor] = [torch.empty(0)] * (ahead + 1)
        self._turn = 0
        self._under_way: deque[tuple[Any, Tensor, list[Any], Deliver]] = deque()

    def push(self, values: Sequence[float | Tensor], deliver: Deliver) -> None:
        """Send numbers on their way: scalars, on this device or the host; `deliver` gets them as floats, in order."""
        there = [value for value in values if _is_under_way(value, self._device)]
        kind = widest_float(self._device)
        together = torch.stack([one.detach().reshape(()).to(self._device, kind) for one in there]) if there else None
        slot = self._slot(0 if together is None else len(together))
        arrived = None if together is None else fetch(together, slot)
        told = [_HERE if _is_under_way(value, self._device) else float(value) for value in values]
        self._under_way.append((arrived, slot, told, deliver))
        while len(self._under_way) > self._ahead:
            self._deliver()

    @property
    def waiting(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    def drain(self) -> None:
        """Wait for all that is under way, and deliver it."""
        while self._under_way:
            self._deliver()

    def forget(self) -> None:
        """Drop what was not delivered."""
        self._under_way.clear()

    def _slot(self, size: int) -> Tensor:
        """Host memory that no copy under way writes to; pinned, where the device is CUDA."""
        self._turn = (self._turn + 1) % len(self._slots)
        if self._slots[self._turn].numel() < size:
            pinned = self._device.type == "cuda"
            kind = widest_float(self._device)
            self._slots[self._turn] = torch.empty(max(size, 8), dtype=kind, pin_memory=pinned)
        return self._slots[self._turn][:size]

    def _deliver(self) -> None:
        arrived, slot, told, deliver = self._under_way.popleft()
        if arrived is not None:
            arrived.synchronize()
        numbers = iter(slot.tolist())
        deliver([next(numbers) if value is _HERE else value for value in told])


def fetch(numbers: Tensor, slot: Tensor) -> Any:
    """Copy numbers from a device into host memory while the host goes on; return the event of their arrival."""
    slot.copy_(numbers, non_blocking=True)
    if numbers.device.type != "cuda":
        return None
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(numbers.device))  # another device may be the current one
    return arrived


_HERE: Any = object()
"""In the place of a number that is under way."""


def _is_under_way(value: float | Tensor, device: torch.device) -> TypeGuard[Tensor]:
    """Whether only the device has a number; a tensor on the CPU, beside a device that is another, is at hand."""
    return isinstance(value, Tensor) and not (value.is_cpu and device.type != "cpu")
