"""Host memory that a checkpoint is copied into: allocated and touched ahead of time, kept and used again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from trainwright.checkpointing.files import Content
from trainwright.checkpointing.tensorfile import Contents

ALIGNED = 64
"""Bytes that the place of every tensor is a multiple of: that of every dtype, and a line of the cache."""
_TOUCHED = 1 << 14
"""Pages that are touched at a time: so few that torch does it in one thread and lets others run in between."""
_mapped: WeakSet[mmap.mmap] = WeakSet()
_inherited: list[mmap.mmap] = []


class Arena:
    """One block of host memory that takes the tensors of one checkpoint at a time; pinned for those on CUDA.

    `reserve` may run in another thread, as long as nothing else is done with the arena meanwhile. What does not fit
    when `copy` is called gets memory of its own for that one time: right, but slower, since it was never touched.
    Forked children do not inherit the block, so that it need not be copied a second time when it is written to.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self.wanted = 0
        """Bytes that the last `copy` took."""

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self._block.numel()

    def reserve(self, size: int, device: torch.device | None = None) -> None:
        """Have a block of at least `size` bytes, touched, and pinned if copies are to come from a CUDA `device`.

        A smaller one is given back first, so that there are never two. OSError where the system has no such memory.
        """
        pins = device is not None
        if size <= self.size and self._pinned >= pins:
            return
        size = max(size, self.size)
        self.free()
        self._block = _touch(_host_memory(size))
        self._pinned = device is not None and _pin(self._block, device)

    def copy(self, files: Mapping[str, Content]) -> dict[str, Content]:
        """The same files with copies of their tensors, which hold until the next `copy` or `free`.

        One pass over the tensors; copies from a device go out together and are waited for once.
        """
        copies: dict[str, Content] = {
            name: content if isinstance(content, bytes) else Contents({}, content.metadata)
            for name, content in files.items()
        }
        places = _places(files)
        self.wanted = places[-1].stop if places else 0
        cut = next((place.start for place in places if place.stop > self.size), self.wanted)
        more = _host_memory(self.wanted - cut) if cut < self.wanted else self._block
        with torch.no_grad():
            for place in places:
                memory, at = (self._block, place.start) if place.start < cut else (more, place.start - cut)
                contents = copies[place.file]
                assert not isinstance(contents, bytes)
                contents.tensors[place.name] = _copied(place.tensor, memory[at : at + place.stop - place.start])
        for device in {place.tensor.device for place in places if place.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def free(self) -> None:
        """Give the memory back, as soon as no copy is in use."""
        if self._pinned:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._block.data_ptr())
        self._block, self._pinned = torch.empty(0, dtype=torch.uint8), False


def needs(files: Mapping[str, Content]) -> tuple[int, torch.device | None]:
    """Bytes that an arena needs for the tensors of `files`, and the first CUDA device that any of them is on."""
    places = _places(files)
    devices = (place.tensor.device for place in places if place.tensor.is_cuda)
    return (places[-1].stop if places else 0), next(devices, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where in the memory one tensor of one file is copied to."""

    file: str
    name: str
    tensor: Tensor
    start: int
    stop: int


def _places(files: Mapping[str, Content]) -> list[_Place]:
    places, at = [], 0
    for file, content in files.items():
        for name, tensor in () if isinstance(content, bytes) else content.tensors.items():
            start = -(-at // ALIGNED) * ALIGNED
            at = start + tensor.numel() * tensor.element_size()
            places.append(_Place(file, name, tensor, start, at))
    return places


def _copied(tensor: Tensor, memory: Tensor) -> Tensor:
    """The values of a tensor, laid out as in a file, in memory of exactly their size."""
    copy = memory.view(tensor.dtype).reshape(tensor.shape)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # As bytes: some dtypes have no copy of their own.
        memory.copy_(tensor.detach().reshape(-1).view(torch.uint8), non_blocking=tensor.is_cuda)
    else:
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return copy


def _host_memory(size: int) -> Tensor:
    """Bytes that forked children do not inherit, where the system can do that.

    A loader's workers would otherwise share the pages, and the first write to each of them copies it: twice the time
    and twice the memory. OSError where there is no such memory.
    """
    _keep_in_children()
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapped = mmap.mmap(-1, max(1, size), **flags)
    _mapped.add(mapped)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def _touch(memory: Tensor) -> Tensor:
    """Have the system give all pages now: the first write to a page costs more than all the copying into it."""
    for pages in memory[:: mmap.PAGESIZE].split(_TOUCHED):
        pages.zero_()
    return memory


def _pin(memory: Tensor, device: torch.device) -> bool:
    """Whether the memory is pinned; where the system does not allow it, copies from the device are slower."""
    if not memory.numel():
        return False
    with torch.cuda.device(device):
        portable = 1  # for every device of the process
        cuda: Any = torch.cuda.cudart()
        return int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), portable)) == 0


@cache
def _keep_in_children() -> None:
    """Where a child frees what it has not inherited, it would unmap what has come to lie there since."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))
