"""Copies the state of a save to host memory, and writes it in a background thread while training continues."""

from __future__ import annotations

import mmap
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from queue import Queue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from trainwright.checkpointing.files import Content
from trainwright.checkpointing.tensorfile import Contents
from trainwright.core.errors import warn_user

T = TypeVar("T")
Files = Mapping[str, Content]
ALIGNMENT = 64
"""Bytes. Each copy begins at a multiple of it: a multiple of every dtype's size, and of a cache line."""
_POLL = 0.5
"""Seconds per wait. On Windows a wait without a timeout ignores Ctrl-C."""
_PAGES_AT_A_TIME = 1 << 14
"""Pages per call: few, so that torch touches them in one thread and other threads run in between."""
_mapped: WeakSet[mmap.mmap] = WeakSet()
_inherited: list[mmap.mmap] = []


@dataclass(frozen=True, slots=True)
class SaveOutcome(Generic[T]):
    """The result of a save, or its error."""

    result: T | None
    error: BaseException | None = None


class Writer(Generic[T]):
    """Copies the tensors of a save, then writes them in a daemon thread.

    At most one save is in flight; the next one waits for it. The training thread calls all methods. The thread starts
    with the first save and ends with `close`. A forked child does not have the thread and must not write. Ctrl-C
    interrupts every wait at once; the save in flight continues.
    """

    def __init__(self, name: str, *, async_save: bool, on_result: Callable[[], None] | None = None) -> None:
        self.memory = Memory()
        self._name, self._async_save = name, async_save
        self._on_result = on_result
        """Called in the thread after a save has succeeded or failed."""
        self._jobs: Queue[tuple[Callable[[], Any], bool] | None] = Queue()
        """Jobs of the thread, in order: (function, whether it is a save with an outcome). None ends the thread."""
        self._outcomes: deque[SaveOutcome[T]] = deque()
        self._has_begun, self._ended = False, threading.Event()
        self._last: Callable[[], object] = self.memory.free
        self._process = os.getpid()

    def reserve(self, files: Files) -> None:
        """Allocate memory for copies of files of these sizes, in the thread, after the save in flight.

        Without it, or if the state has grown since, `submit` allocates the memory while training waits.
        """
        if self._async_save:
            self._put(partial(_reserve, self.memory, *memory_needs(files)), is_save=False)

    def submit(self, files: Files, write: Callable[[Files], T]) -> None:
        """Call `write` with copies of `files` in the thread, after the save in flight.

        Without `async_save`, or without memory for the copies, call `write` at once with the originals. `outcomes`
        returns the result or the error. No reference to the files is left.
        """
        self.wait()
        copies = self.copy(files)
        if copies is None:
            self._outcomes.append(_run(partial(write, files), Exception))
        else:
            self.start(partial(write, copies))
            if self.memory.used > self.memory.size:  # the state has grown: reserve more memory for the next save
                self.reserve(files)

    def copy(self, files: Files) -> Files | None:
        """Return the files with copies of their tensors. None without `async_save`, or without enough memory."""
        if not self._async_save:
            return None
        try:
            return self.memory.copy(files)
        except OSError as error:
            _warn_of_memory(files, error)
            return None

    def start(self, save: Callable[[], T]) -> None:
        """Run a save in the thread, after the one in flight."""
        self.wait()
        self._put(save, is_save=True)

    def wait(self) -> None:
        """Wait until no save and no reservation is in flight."""
        if not self._is_own_process:
            return
        with self._jobs.all_tasks_done:
            while self._jobs.unfinished_tasks:
                self._jobs.all_tasks_done.wait(_POLL)

    def outcomes(self) -> list[SaveOutcome[T]]:
        """Return the outcomes of saves since the last call, oldest first."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def close(self, last: Callable[[], object], *, wait: bool = True) -> None:
        """Wait for the save in flight, free the memory, call `last`, and end the thread.

        Without `wait`, return at once if a save is in flight; the thread does the rest after the save.
        """
        if not self._is_own_process or self._ended.is_set():
            return

        def finish() -> None:
            self.memory.free()
            last()

        if not self._has_begun:
            finish()
            return
        waits = wait or not self._jobs.unfinished_tasks
        self._last = finish
        self._jobs.put(None)
        while waits and not self._ended.wait(_POLL):  # `join` counts an interrupted wait as the end of the thread
            pass

    @property
    def _is_own_process(self) -> bool:
        """Whether this process has the thread. A forked child does not, and must not wait for it."""
        return os.getpid() == self._process

    def _put(self, job: Callable[[], Any], *, is_save: bool) -> None:
        if not self._is_own_process:
            raise RuntimeError("checkpoints are written by the process that called fit, not by one forked off in it")
        self._jobs.put((job, is_save))
        if not self._has_begun:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._has_begun = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, is_save = job
            outcome = _run(run, BaseException)
            del job, run  # no reference is left when the job counts as done
            if is_save or outcome.error is not None:
                self._outcomes.append(outcome)
            self._jobs.task_done()
            if is_save and self._on_result is not None:
                self._on_result()
        try:
            self._last()
        finally:
            self._jobs.task_done()
            self._ended.set()


def _warn_of_memory(files: Files, error: OSError) -> None:
    size = memory_needs(files)[0] / 2**30
    warn_user(
        f"there is no memory for a copy of the state ({size:.1f} GiB: {error.strerror}): "
        "training waits while it is written; Checkpoint(..., async_save=False) does so always"
    )


def _run(job: Callable[[], T], caught: type[BaseException]) -> SaveOutcome[T]:
    try:
        return SaveOutcome(job())
    except caught as error:
        del job  # the traceback of the error refers to this frame, too
        _drop_references(error)
        return SaveOutcome(None, error)


def _drop_references(error: BaseException) -> None:
    """Clear the frames of an error, which would keep the tensors of its save in memory."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


# Memory for the copies


class Memory:
    """One block of host memory for the tensors of one save at a time. Pinned if a tensor is on CUDA.

    `reserve` may run in another thread while the block is unused. If tensors do not fit, `copy` allocates further
    memory for this call: correct, but slower, since its pages are new. Forked children do not inherit the block: else
    the first write to each page after a fork would copy that page.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self.used = 0
        """Bytes used by the last `copy`."""

    @property
    def size(self) -> int:
        """Size of the block in bytes."""
        return self._block.numel()

    def reserve(self, size: int, device: torch.device | None = None) -> None:
        """Allocate and touch a block of at least `size` bytes. `device`: pin it for copies from this CUDA device.

        A smaller block is freed first: two blocks never exist together. OSError without enough memory.
        """
        pins = device is not None
        if size <= self.size and self._is_pinned >= pins:
            return
        size = max(size, self.size)
        self.free()
        self._block = _touch(_host_memory(size))
        self._is_pinned = device is not None and _pin(self._block, device)

    def copy(self, files: Files) -> dict[str, Content]:
        """Return the files with copies of their tensors, valid until the next `copy` or `free`.

        Copies from a device are queued together, with one synchronization at the end.
        """
        copies: dict[str, Content] = {
            name: content if isinstance(content, bytes) else Contents({}, content.metadata)
            for name, content in files.items()
        }
        places = _places(files)
        self.used = places[-1].stop if places else 0
        cut = next((place.start for place in places if place.stop > self.size), self.used)
        more = _host_memory(self.used - cut) if cut < self.used else self._block
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
        """Free the memory. No copy may be in use."""
        if self._is_pinned:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_pinned = torch.empty(0, dtype=torch.uint8), False


def memory_needs(files: Files) -> tuple[int, torch.device | None]:
    """Return (bytes for copies of the tensors, the first CUDA device among them or None)."""
    places = _places(files)
    devices = (place.tensor.device for place in places if place.tensor.is_cuda)
    return (places[-1].stop if places else 0), next(devices, None)


@dataclass(frozen=True, slots=True, eq=False)
class _CopyPlace:
    """The byte range in the memory for the copy of one tensor of one file."""

    file: str
    name: str
    tensor: Tensor
    start: int
    stop: int


def _places(files: Files) -> list[_CopyPlace]:
    places, at = [], 0
    for file, content in files.items():
        for name, tensor in () if isinstance(content, bytes) else content.tensors.items():
            start = -(-at // ALIGNMENT) * ALIGNMENT
            at = start + tensor.numel() * tensor.element_size()
            places.append(_CopyPlace(file, name, tensor, start, at))
    return places


def _copied(tensor: Tensor, memory: Tensor) -> Tensor:
    """Copy a tensor, contiguously, into memory of exactly its size; return the copy."""
    copy = memory.view(tensor.dtype).reshape(tensor.shape)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # As bytes: torch cannot copy some dtypes.
        memory.copy_(tensor.detach().reshape(-1).view(torch.uint8), non_blocking=tensor.is_cuda)
    else:
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return copy


def _host_memory(size: int) -> Tensor:
    """Return memory that forked children do not inherit, if the system supports that.

    Otherwise dataloader workers share the pages, and the first write to each page copies it: twice the time and twice
    the memory. OSError without enough memory.
    """
    _unmap_nothing_in_children()
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapped = mmap.mmap(-1, max(1, size), **flags)
    _mapped.add(mapped)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size]


def _reserve(memory: Memory, size: int, device: torch.device | None) -> None:
    with suppress(OSError):  # `copy` raises it again, and the writer warns
        memory.reserve(size, device)


def _touch(memory: Tensor) -> Tensor:
    """Write to each page, so that the system allocates it now: a first write costs more than the copy."""
    for pages in memory[:: mmap.PAGESIZE].split(_PAGES_AT_A_TIME):
        pages.zero_()
    return memory


def _pin(memory: Tensor, device: torch.device) -> bool:
    """Pin memory; return whether the system allowed it. Copies to unpinned memory are slower."""
    if not memory.numel():
        return False
    with torch.cuda.device(device):
        portable = 1  # pinned for every device of the process
        cuda: Any = torch.cuda.cudart()
        return int(cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), portable)) == 0


@cache
def _unmap_nothing_in_children() -> None:
    """Keep the mappings alive in forked children: freeing one there could unmap memory of the child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))
