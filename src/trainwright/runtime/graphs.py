"""Records what is enqueued on a device, to have it carried out again at once on the same memory: CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch

LAUNCH_BOUND = 0.7
"""The host's part of an update's time from which a graph pays: below it the device is what is waited for."""


class Recorder(Protocol):
    """What torch's `CUDAGraph` is: a recording, and its replay."""

    def recording(self) -> AbstractContextManager[None]:
        """What is enqueued inside is recorded, and not carried out; an error inside leaves it, and no recording."""
        ...

    def replay(self) -> None:
        """Have all that was recorded carried out, on the memory that it was recorded with."""
        ...


class _Pool:
    """Memory that the recordings of a device share."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


class CudaGraph:
    """A recording of one CUDA device, in memory that all recordings of the device share.

    The recordings of a device are replayed one after the other: what one of them gives is read before the next.
    """

    _pools: ClassVar[WeakValueDictionary[torch.device, _Pool]] = WeakValueDictionary()
    """As long as a recording of the device lives: the allocator forgets a pool that none uses any more."""
    _streams: ClassVar[dict[torch.device, Any]] = {}
    """For good: memory is shared within a stream alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool = self._pools.get(device) or _Pool()
        self._pools[device] = self._pool

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is enqueued inside, on a stream of its own."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            stream = self._streams.get(self._device) or torch.cuda.Stream(self._device)
            self._streams[self._device] = stream
            stream.wait_stream(current)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            # All recordings draw from one state, so that each goes on where the last one ended. One that fails leaves
            # it unfit for draws: this copy takes its place.
            before = generator.clone_state()
            try:
                pool = self._pool.handle
                with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    yield
            except BaseException:
                torch.cuda.set_stream(current)  # torch stays on the other one where a recording cannot be ended
                generator.graphsafe_set_state(before)
                self._leave_pool()
                torch.cuda.synchronize(self._device)
                raise
            current.wait_stream(stream)

    def _leave_pool(self) -> None:
        """Have the allocator know that nothing is recorded any more, and have the next recording take other memory.

        Up to torch 2.11 a recording that cannot be ended is never over for it, and then it frees nothing any more.
        """
        self._pools.pop(self._device, None)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with suppress(RuntimeError):  # it was ended
            if end is not None:
                end(torch.cuda.current_device(), self._pool.handle)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool.handle)

    def replay(self) -> None:
        """Have it carried out on the current stream."""
        self._graph.replay()


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}
"""What records on which kind of device."""


class Timed:
    """Whether the host, and not the device, is what updates wait for: measured over a few of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: list[float] = []
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def update(self) -> Iterator[None]:
        """Time one update: what the host takes to enqueue it, and the device to carry it out."""
        if self._device.type != "cuda":
            yield
            return
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        begun.record(stream)
        before = time.perf_counter()
        yield
        self._host.append(time.perf_counter() - before)
        ended.record(stream)
        self._events.append((begun, ended))

    @property
    def share(self) -> float:
        """The host's time over the device's, of the updates after the first; waits for the last one."""
        if not self._events:
            return 1.0
        self._events[-1][1].synchronize()
        device = sum(begun.elapsed_time(ended) for begun, ended in self._events[1:]) / 1e3
        return sum(self._host[1:]) / device if device else 1.0
