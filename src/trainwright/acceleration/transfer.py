"""The way of host batches to an accelerator: by pinned memory, on a stream of their own, into memory used again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from trainwright.core.device import change, move
from trainwright.core.torch_private import storage_uses

SLOTS = 3
"""Batches on their way or in use at a time: one computes, one is there, one is copied."""
SPECS = 4
"""Kinds of batches, by the shapes and dtypes of their tensors, that slots are kept for."""

Spec = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


class Event(Protocol):
    """A place in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Stand behind all that `stream` has been given so far."""

    def synchronize(self) -> None:
        """Have the host wait until that is done."""


class Lane(Protocol):
    """What the slots need of an accelerator, so that the order of things can be tested without one."""

    def computing(self) -> Any:
        """The stream on which the host's kernels run now."""

    def event(self) -> Event:
        """An event that stands nowhere yet."""
        ...

    def wait(self, event: Event) -> None:
        """Have the copies that follow wait for `event`."""

    def follow(self, stream: Any) -> None:
        """Have the copies that follow wait for all that `stream` has been given so far."""

    def lead(self, event: Event, stream: Any) -> None:
        """Record `event` behind all copies so far, and have `stream` wait for it."""

    def pinned(self, like: Tensor) -> Tensor:
        """Pinned host memory of the form of a host tensor."""
        ...

    def memory(self, like: Tensor) -> Tensor:
        """Memory of the accelerator of the form of a host tensor, in the order of the computing stream."""
        ...

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether copies may be made from a host tensor as it is, while the host goes on."""
        ...

    def stage(self, pinned: Tensor, source: Tensor) -> None:
        """Write a host tensor into pinned memory, now."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the accelerator, behind the copies so far, while the host goes on."""


class Moving:
    """Moves nested batches to an accelerator as `device.move` does, while the step before computes.

    A batch is written into pinned memory (one that is pinned already is taken as it is), copied on a stream of its
    own, and given as tensors in the accelerator's memory, which the computing stream waits for. Both memories belong
    to one of `SLOTS` slots and are used again: host memory when the copy from it is done, the accelerator's when
    nobody holds a tensor in it any more and the kernels that were given before that have run. What somebody still
    holds is his for good, and the slot gets other memory. For each of the last `SPECS` kinds of batches there are
    slots. Tensors that lie elsewhere than on the host, need a gradient or are of a class of their own move plainly.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self.device = device
        self._lane = lane
        self._rings: OrderedDict[Spec, _Ring] = OrderedDict()
        self._held: list[_Slot] = []
        """Slots whose tensors were given and not yet seen to be let go."""
        self._stream: Any = None
        """The computing stream of the last batch."""

    def __call__(self, batch: Any) -> Any:
        """The batch on the accelerator, with all its types kept."""
        found: list[Tensor] = []
        _collect(batch, found)
        if not found:
            return move(batch, self.device)
        sent = iter(self._sent(found))
        return change(batch, self.device, lambda one: next(sent) if _is_plain(one) else move(one, self.device))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing but the device: a copy begins with slots of its own."""
        return {"device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"])  # type: ignore[misc]

    def free(self) -> None:
        """Give all memory back; the next batch gets slots anew."""
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
        self._held = [slot for slot in self._held if not slot.is_let_go(lane, stream)]
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
    """Streams, events and memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def computing(self) -> torch.cuda.Stream:
        """The current stream of the device."""
        return torch.cuda.current_stream(self._device)

    def event(self) -> Event:
        """An event for order alone, without a time; the host sleeps while it waits for it."""
        made: Event = torch.cuda.Event(blocking=True)
        return made

    def wait(self, event: Any) -> None:
        """Have the copies that follow wait for `event`."""
        self._copies.wait_event(event)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Have the copies that follow wait for all that `stream` has been given so far."""
        self._copies.wait_stream(stream)

    def lead(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Record `event` behind all copies so far, and have `stream` wait for it."""
        event.record(self._copies)
        stream.wait_event(event)

    def pinned(self, like: Tensor) -> Tensor:
        """Pinned host memory of the form of a host tensor."""
        with self._normal():
            return torch.empty_like(like, pin_memory=True)

    def memory(self, like: Tensor) -> Tensor:
        """Memory of the device of the form of a host tensor, in the order of the current stream."""
        with self._normal():
            return torch.empty_like(like, device=self._device)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor lies in pinned memory."""
        return tensor.is_pinned()

    def stage(self, pinned: Tensor, source: Tensor) -> None:
        """Write a host tensor into pinned memory, now."""
        pinned.copy_(source)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device, behind the copies so far."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def _normal(self) -> AbstractContextManager[None]:
        # What is made under inference mode could not be trained on when it is used again.
        normal: AbstractContextManager[None] = torch.inference_mode(mode=False)
        return normal


class _Ring:
    """The slots of one kind of batches, used in turn; made as they are needed."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._next = 0

    def next(self, lane: Lane, found: list[Tensor]) -> _Slot:
        if self._next == len(self._slots):
            self._slots.append(_Slot(lane, found))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        return slot


class _Slot:
    """Memory of both sides for one batch, and the events that say when it may be written to."""

    def __init__(self, lane: Lane, found: list[Tensor]) -> None:
        self._host: list[Tensor | None] = [None] * len(found)
        self._memory = [lane.memory(one) for one in found]
        self._uses = [_Uses(one) for one in self._memory]
        self._sources: list[Tensor] = []
        """What the last copies were made from, kept until they are done."""
        self._ready, self._free = lane.event(), lane.event()
        self._is_free = False
        """Whether `_free` stands behind all kernels that read the tensors given last."""

    def is_let_go(self, lane: Lane, stream: Any) -> bool:
        """Whether nobody holds the tensors that were given; then notes what was computed until now."""
        if self._is_free:
            return True
        if any(use.others() for use in self._uses):
            return False
        self._free.record(stream)
        self._is_free = True
        return True

    def fill(self, lane: Lane, stream: Any, found: list[Tensor]) -> list[Tensor]:
        """Send these host tensors; gives them on the accelerator."""
        if self._sources:
            self._ready.synchronize()  # the copies before from this host memory: done long ago, unless we run ahead
        self._sources = [self._staged(lane, place, one) for place, one in enumerate(found)]
        if not self.is_let_go(lane, stream):
            self._replace_held(lane, found)
            self._free.record(stream)
        lane.wait(self._free)
        for target, source in zip(self._memory, self._sources, strict=True):
            lane.copy(target, source)
        lane.lead(self._ready, stream)
        self._is_free = False
        # Each has its own count of changes in place, as a tensor that was moved has.
        return [memory.data for memory in self._memory]

    def _staged(self, lane: Lane, place: int, source: Tensor) -> Tensor:
        if lane.is_pinned(source):
            return source
        host = self._host[place]
        if host is None:
            host = self._host[place] = lane.pinned(source)
        lane.stage(host, source)
        return host

    def _replace_held(self, lane: Lane, found: list[Tensor]) -> None:
        for place, use in enumerate(self._uses):
            if use.others():
                self._memory[place] = lane.memory(found[place])
                self._uses[place] = _Uses(self._memory[place])


class _Uses:
    """Who else holds the memory of a tensor: its views, and what autograd has saved, count as well."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._alone = self._count()

    def others(self) -> bool:
        """Whether anything holds the memory beside the tensor it was made for; True where torch cannot tell."""
        return self._alone is None or self._count() != self._alone

    def _count(self) -> int | None:
        return storage_uses(self._storage)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a block of numbers on the host."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _collect(batch: Any, found: list[Tensor]) -> None:
    """The plain host tensors of a nested batch, in the order in which `change` comes to them."""
    items: Any = ()
    if isinstance(batch, Tensor):
        if _is_plain(batch):
            found.append(batch)
    elif hasattr(batch, "to") and callable(batch.to):
        return  # it moves itself
    elif isinstance(batch, Mapping):
        items = batch.values()
    elif isinstance(batch, list | tuple):
        items = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for item in items:
        _collect(item, found)
