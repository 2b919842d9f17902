"""Copy host batches to an accelerator while the step before computes: by pinned memory, on a stream of their own.

Not run on a GPU yet: tests put stand-ins for streams, events and memory in its place.
"""

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
"""Batches in flight at a time: one is computed on, one is ready, one is copied."""
SPECS = 4
"""The number of kinds of batches, by shapes, strides and dtypes of their tensors, that slots are kept for."""

Spec = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


class Moving:
    """Moves nested batches to an accelerator as `device.move` does, while the step before computes.

    A batch is copied into pinned memory, unless it is pinned already, and from there to the accelerator on a stream of
    its own; the computing stream waits for this copy. Both memories belong to one of `SLOTS` slots and are reused: the
    pinned one when the copy from it is done, the accelerator's when no tensor refers to it any more and the kernels
    launched before that have run. Memory that a tensor still refers to is left to it, and the slot allocates other
    memory. Slots are kept for the last `SPECS` kinds of batches. `device.move` moves tensors that are not on the host,
    require a gradient or are of a subclass.
    """

    def __init__(self, device: torch.device, lane: CudaLane | None = None) -> None:
        self.device = device
        self._lane = lane
        self._rings: OrderedDict[Spec, _Ring] = OrderedDict()
        self._held: list[_Slot] = []
        """Slots whose memory was still referred to at the last look."""
        self._stream: Any = None
        """The computing stream of the last batch."""

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the accelerator; containers keep their types."""
        leaves = (leaf for _, leaf in leaves_of(batch, is_leaf=moves_itself))  # in the order of `change`
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_plain(leaf)]
        if not found:
            return move(batch, self.device)
        sent = iter(self._sent(found))
        return change(batch, self.device, lambda one: next(sent) if _is_plain(one) else move(one, self.device))

    def __getstate__(self) -> dict[str, Any]:
        """Return the device alone: a copy makes its own slots."""
        return {"device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"])  # type: ignore[misc]

    def free(self) -> None:
        """Free all slots; the next batch makes new ones."""
        self._rings.clear()
        self._held.clear()
        self._stream = None

    def _sent(self, found: list[Tensor]) -> list[Tensor]:
        if self._lane is None:
            self._lane = CudaLane(self.device)
        lane, stream = self._lane, self._lane.computing()
        if self._stream is not None and stream != self._stream:
            lane.follow(self._stream)  # what was computed there with the tensors of a slot
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
    """Streams, events and memory of a CUDA device: all that slots use; tests put others in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def computing(self) -> Any:
        """Return the stream on which kernels run now."""
        return torch.cuda.current_stream(self._device)

    def event(self) -> Any:
        """Return a new event, without timing; the host sleeps, and does not spin, while it waits for it."""
        return torch.cuda.Event(blocking=True)

    def wait(self, event: Any) -> None:
        """Have later copies wait for `event`."""
        self._copies.wait_event(event)

    def follow(self, stream: Any) -> None:
        """Have later copies wait for all work that `stream` has been given so far."""
        self._copies.wait_stream(stream)

    def lead(self, event: Any, stream: Any) -> None:
        """Record `event` after all copies so far, and have `stream` wait for it."""
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
        """Return whether a host tensor can be copied from without blocking the host."""
        return tensor.is_pinned()

    def stage(self, pinned: Tensor, source: Tensor) -> None:
        """Copy a host tensor into pinned memory, and return when that is done."""
        pinned.copy_(source)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device after the copies so far, without blocking the host."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)


def _normal() -> AbstractContextManager[None]:
    # A tensor made in inference mode could not be trained on when its memory is reused.
    normal: AbstractContextManager[None] = torch.inference_mode(mode=False)
    return normal


class _Ring:
    """The slots of one kind of batches, used in turn, made on first use."""

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
    """Host and device memory of one batch, and the events after which it may be written to."""

    def __init__(self, lane: CudaLane, found: list[Tensor]) -> None:
        self._host: list[Tensor | None] = [None] * len(found)
        self._memory = [lane.memory(one) for one in found]
        self._uses = [_Uses(one) for one in self._memory]
        self._sources: list[Tensor] = []
        """The tensors that the last copies read, kept until these are done."""
        self._ready, self._free = lane.event(), lane.event()
        self._is_free = False
        """Whether `_free` is recorded after all kernels that read the last batch."""

    def is_released(self, stream: Any) -> bool:
        """Return whether no tensor refers to the memory any more; then record the kernels launched so far."""
        if self._is_free:
            return True
        if any(use.others() for use in self._uses):
            return False
        self._free.record(stream)
        self._is_free = True
        return True

    def fill(self, lane: CudaLane, stream: Any, found: list[Tensor]) -> list[Tensor]:
        """Copy these host tensors; return them on the accelerator."""
        if self._sources:
            self._ready.synchronize()  # earlier copies from this pinned memory: done, unless the host is far ahead
        self._sources = [self._staged(lane, place, one) for place, one in enumerate(found)]
        if not self.is_released(stream):
            self._replace_held(lane, found)
            self._free.record(stream)
        lane.wait(self._free)
        for target, source in zip(self._memory, self._sources, strict=True):
            lane.copy(target, source)
        lane.lead(self._ready, stream)
        self._is_free = False
        # A version counter of its own for each, as for a tensor that was moved.
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
    """Counts the references to the memory of a tensor: views, and tensors that autograd has saved, count."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._alone = self._count()

    def others(self) -> bool:
        """Return whether anything refers to the memory beside the slot; True where torch cannot say."""
        return self._alone is None or self._count() != self._alone

    def _count(self) -> int | None:
        return storage_uses(self._storage)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense one on the host, of no subclass, without a gradient."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )
