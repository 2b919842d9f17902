"""An accelerator emulated on the CPU: its streams run late, in any order that events allow, and on real memory."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch

from trainwright.acceleration.transfer import Moving


class Stream:
    def __init__(self):
        self.work = deque()


class Event:
    """A place in a stream; who waits waits for the place it has then, as with CUDA's."""

    def __init__(self, lane):
        self._lane = lane
        self.recorded, self.reached = 0, set()

    def record(self, stream):
        self.recorded += 1
        stream.work.append(("reach", self, self.recorded))

    def synchronize(self):
        wanted = self.recorded
        self._lane.run(until=lambda: wanted in self.reached)


class FakeLane:
    """Does nothing before it must: copies and kernels wait in their streams, and are drawn from them at random.

    Host memory that a copy still has to read must not be written to. Kernels hold no reference to what they read.
    """

    def __init__(self, seed=0):
        self.compute, self.copies = Stream(), Stream()
        self.pins, self.memories = 0, 0
        self._arrays = {}
        self._unread = {}
        self._draw = random.Random(seed)
        self.others = []
        """Streams that computed before; they run only where nothing else may."""
        self.eager = None
        """The stream that always runs first where it may."""
        self.waits = 0

    def computing(self):
        return self.compute

    def event(self):
        return Event(self)

    def wait(self, event):
        self.copies.work.append(("await", event, event.recorded))

    def follow(self, stream):
        event = Event(self)
        event.record(stream)
        self.wait(event)

    def lead(self, event, stream):
        event.record(self.copies)
        stream.work.append(("await", event, event.recorded))

    def pinned(self, like):
        self.pins += 1
        return torch.empty_like(like)

    def memory(self, like):
        """Memory of the accelerator; kernels given before may still write to it, so that it is filled late."""
        self.memories += 1
        array = np.zeros(like.numel() * like.element_size(), dtype=np.uint8)
        made = torch.from_numpy(array).view(like.dtype).as_strided(like.shape, torch.empty_like(like).stride())
        self._arrays[made.data_ptr()] = array  # no tensor, which would count as a holder
        self.compute.work.append(("do", lambda: array.fill(0xAA), None))
        return made

    def is_pinned(self, tensor):
        return getattr(tensor, "is_said_pinned", False)

    def stage(self, pinned, source):
        assert not self._unread.get(pinned.data_ptr()), "host memory is written to before it was copied"
        pinned.copy_(source)

    def copy(self, target, source):
        assert target.stride() == source.stride() and target.dtype == source.dtype
        array, address = self._arrays[target.data_ptr()], source.data_ptr()
        self._unread[address] = self._unread.get(address, 0) + 1

        def do():
            array[:] = np.frombuffer(source.as_strided((source.numel(),), (1,)).numpy().tobytes(), dtype=np.uint8)
            self._unread[address] -= 1

        self.copies.work.append(("do", do, None))

    def kernel(self, tensor, seen):
        """A kernel on the computing stream that notes in `seen` the numbers it reads, when it runs."""
        array, dtype = self._arrays[tensor.data_ptr()], tensor.dtype
        self.compute.work.append(("do", lambda: seen.append(torch.from_numpy(array.copy()).view(dtype).tolist()), None))

    def run(self, until=None):
        """Run streams in any order that is allowed, until something is so; or to their end."""
        self.waits += until is not None
        while until is None or not until():
            ready = self._ready(self.compute, self.copies) or self._ready(*self.others)
            if not ready:
                assert until is None, "waits for what was never recorded"
                assert not any(one.work for one in (self.compute, self.copies, *self.others)), "a ring of waits"
                return
            chosen = self.eager if self.eager in ready else self._draw.choice(ready)
            kind, what, number = chosen.work.popleft()
            if kind == "do":
                what()
            elif kind == "reach":
                what.reached.add(number)

    def _ready(self, *streams):
        heads = [(stream, stream.work[0]) for stream in streams if stream.work]
        return [stream for stream, (kind, event, number) in heads if kind != "await" or number in event.reached]


def moving(seed=0):
    lane = FakeLane(seed)
    return Moving(torch.device("cpu"), lane), lane
