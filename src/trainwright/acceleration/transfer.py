"""Copies host batches to an accelerator while the previous step computes, through pinned memory, on a copy stream."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trainwright.core.device import change, move, moves_itself
from trainwright.core.torch_private import storage_uses
from trainwright.core.trees import leaves_of

SLOTS = 3
"""Batches in flight: one in computation, one ready, one in copy."""
SPECS = 4
"""Number of kinds of batches with slots. A kind is shapes, strides and dtypes of the tensors."""

Spec = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


class Moving:
    """Moves nested batches to an accelerator like `device.move`, while the previous step computes.

    A batch is copied to pinned memory, unless it is pinned already, and from there to the accelerator on a copy stream.
    The compute stream waits for that copy.

    Both memories belong to one of `SLOTS` slots and are reused. Pinned memory is reused after the copy from it. Device
    memory is reused when no tensor refers to it and the kernels launched until then have run. If a tensor still refers
    to it, the slot allocates new memory. The last `SPECS` kinds of batches have slots. `device.move` moves tensors that
    are not on the host, require a gradient or are of a subclass.
    """

    def __init__(self, device: torch.device, lane: CudaLane | None = None) -> None:
        self.device = device
        self._lane = lane
        self._rings: OrderedDict[Spec, _Ring] = OrderedDict()
        self._held: list[_Slot] = []
        """Slots whose memory was still referenced at the last check."""
        self._stream: Any = None
        """The compute stream of the last batch."""

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the accelerator; containers keep their types."""
        leaves = (leaf for _, leaf in leaves_of(batch, is_leaf=moves_itself))  # in the order of `change`
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_plain(leaf)]
        if not found:
            return move(batch, self.device)
        sent = iter(self._sent(found))
        return change(batch, self.device, lambda one: next(sent) if _is_plain(one) else move(one, self.device))

    def __getstate__(self) -> dict[str, Any]:
        """Return the device alone: a copy allocates its own slots."""
        return {"device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"])  # type: ignore[misc]

    def free(self) -> None:
        """Free all slots. The next batch allocates new ones."""
        self._rings.clear()
        self._held.clear()
        self._stream = None

    def _sent(self, found: list[Tensor]) -> list[Tensor]:
        if self._lane is None:
            self._lane = CudaLane(self.device)
        lane, stream = self._lane, self._lane.computing()
        if self._stream is not None and stream != self._stream:
            lane.follow(self._stream)  # kernels there may use the tensors of a slot
        self._stream = stream
        self._held = [slot for slot in self._held if not slot.is_released(stream)]
        slot = self._ring(found).next(lane, found)
        given = slot.fill(lane, stream, found)
        self._held = [one for one in self._held if one is not slot]
        self._held.append(slot)
        return given

    def _ring(self, found: list[Tensor]) -> _Ring:
        spec = tuple((one.shape, one.stride(), one.dtype) for one in found)
        ring = self._rings.get(spec)
        if ring is None:
            if len(self._rings) == SPECS:
                self._rings.popitem(last=False)
            ring = self._rings[spec] = _Ring()
        self._rings.move_to_end(spec)
        return ring


class CudaLane:
    """Streams, events and memory of a CUDA device, as slots use them. Tests replace it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def computing(self) -> Any:
        """Return the current compute stream."""
        return torch.cuda.current_stream(self._device)

    def event(self) -> Any:
        """Return a new event without timing. The host sleeps while it waits for it, and does not spin."""
        return torch.cuda.Event(blocking=True)

    def wait(self, event: Any) -> None:
        """Make later copies wait for `event`."""
        self._copies.wait_event(event)

    def follow(self, stream: Any) -> None:
        """Make later copies wait for all work queued on `stream` so far."""
        self._copies.wait_stream(stream)

    def lead(self, event: Any, stream: Any) -> None:
        """Record `event` after all copies so far, and make `stream` wait for it."""
        event.record(self._copies)
        stream.wait_event(event)

    def pinned(self, like: Tensor) -> Tensor:
        """Return pinned host memory for a tensor like this one."""
        with _normal():
            return torch.empty_like(like, pin_memory=True)

    def memory(self, like: Tensor) -> Tensor:
        """Return device memory for a tensor like this one, allocated on the computing stream."""
        with _normal():
            return torch.empty_like(like, device=self._device)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a host tensor is pinned, so that copies from it do not block."""
        return tensor.is_pinned()

    def stage(self, pinned: Tensor, source: Tensor) -> None:
        """Copy a host tensor to pinned memory; blocks until the copy is done."""
        pinned.copy_(source)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of pinned memory to the device, without blocking the host."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)


def _normal() -> AbstractContextManager[None]:
    # A tensor created in inference mode could not be used for training when its memory is reused.
    normal: AbstractContextManager[None] = torch.inference_mode(mode=False)
    return normal


class _Ring:
    """The slots of one kind of batches, used in turn, created on first use."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._next = 0

    def next(self, lane: CudaLane, found: list[Tensor]) -> _Slot:
        if self._next == len(self._slots):
            self._slots.append(_Slot(lane, found))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        return slot


class _Slot:
    """Host and device memory of one batch, and the events after which it may be overwritten."""

    def __init__(self, lane: CudaLane, found: list[Tensor]) -> None:
        self._host: list[Tensor | None] = [None] * len(found)
        self._memory = [lane.memory(one) for one in found]
        self._uses = [_Uses(one) for one in self._memory]
        self._sources: list[Tensor] = []
        """The source tensors of the last copies, alive until these are done."""
        self._ready, self._free = lane.event(), lane.event()
        self._is_free = False
        """Whether `_free` is recorded after all kernels that read the last batch."""

    def is_released(self, stream: Any) -> bool:
        """Return whether no tensor refers to the memory. If so, record an event after the kernels so far."""
        if self._is_free:
            return True
        if any(use.others() for use in self._uses):
            return False
        self._free.record(stream)
        self._is_free = True
        return True

    def fill(self, lane: CudaLane, stream: Any, found: list[Tensor]) -> list[Tensor]:
        """Copy host tensors to the accelerator; return them there."""
        if self._sources:
            self._ready.synchronize()  # earlier copies from this pinned memory, usually done already
        self._sources = [self._staged(lane, place, one) for place, one in enumerate(found)]
        if not self.is_released(stream):
            self._replace_held(lane, found)
            self._free.record(stream)
        lane.wait(self._free)
        for target, source in zip(self._memory, self._sources, strict=True):
            lane.copy(target, source)
        lane.lead(self._ready, stream)
        self._is_free = False
        # Each result has its own version counter, like a moved tensor.
        return [memory.data for memory in self._memory]

    def _staged(self, lane: CudaLane, place: int, source: Tensor) -> Tensor:
        if lane.is_pinned(source):
            return source
        host = self._host[place]
        if host is None:
            host = self._host[place] = lane.pinned(source)
        lane.stage(host, source)
        return host

    def _replace_held(self, lane: CudaLane, found: list[Tensor]) -> None:
        for place, use in enumerate(self._uses):
            if use.others():
                self._memory[place] = lane.memory(found[place])
                self._uses[place] = _Uses(self._memory[place])


class _Uses:
    """Counts the references to the memory of a tensor, with views and tensors saved by autograd."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._alone = self._count()

    def others(self) -> bool:
        """Return whether anything but the slot refers to the memory; True if unknown."""
        return self._alone is None or self._count() != self._alone

    def _count(self) -> int | None:
        return storage_uses(self._storage)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, on the host, of no subclass, and requires no gradient."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )
