"""Checksums of bytes on their way to or from a file; those of large files are taken beside, by a thread."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Literal, Protocol

Checksum = Literal["crc32", "sha256"]
"""Both detect accidents: crc32 is cheap and misses one random change in 2**32, sha256 misses none. Neither proves
anything about intent: who can change a file can change its sum in the manifest too."""
PIECE = 1 << 22
"""Bytes that are handed to the thread at a time: many enough for its waking up not to count."""


class Hasher(Protocol):
    """A checksum that grows, as those of hashlib do."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """What it is of all bytes so far."""
        ...


class _Crc32:
    """`zlib.crc32` as an object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


SUMS: dict[str, Callable[[], Hasher]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
"""The kinds of checksums by their names in a manifest."""


def checksum_of(data: bytes, kind: str) -> str:
    """The checksum of bytes that are all there."""
    total = SUMS[kind]()
    total.update(data)
    return total.hexdigest()


class Checksummer:
    """The checksum of bytes that are given in order, taken by a thread of its own where they are many.

    What is given must stay as it is until `stop`, which is to be called always, and is kept until it is summed: up to
    `ahead` pieces may wait for that, None being any number, which is right for memory that is there anyway.
    """

    def __init__(self, kind: str, *, ahead: int | None = None) -> None:
        self._sum = SUMS[kind]()
        self._batch: list[bytes | memoryview] = []
        self._size = 0
        self._todo: Queue[list[bytes | memoryview]] = Queue(maxsize=ahead or 0)
        self._thread: Thread | None = None

    def update(self, data: bytes | memoryview) -> None:
        """Take in the next bytes, now or later."""
        self._batch.append(data)
        self._size += len(data)
        if self._size >= PIECE:
            self._hand_over()

    def stop(self) -> str:
        """Wait until all is summed; the checksum."""
        if self._thread is not None:
            if self._batch:
                self._todo.put(self._batch)
            self._todo.put([])  # the end
            self._thread.join()
            self._thread = None
        else:
            self._take(self._batch)
        self._batch, self._size = [], 0
        return self._sum.hexdigest()

    def _hand_over(self) -> None:
        batch, self._batch, self._size = self._batch, [], 0
        if self._thread is None:
            thread = Thread(target=self._run, name="trainwright checksum", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is about to end
                return self._take(batch)
            self._thread = thread
        self._todo.put(batch)

    def _run(self) -> None:
        while batch := self._todo.get():
            self._take(batch)

    def _take(self, batch: list[bytes | memoryview]) -> None:
        for data in batch:
            self._sum.update(data)
