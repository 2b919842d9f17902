"""Findings in the user's own lines: reads of the device in each step, rows that are copied or files opened anew."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainwright.core.errors import is_ours, is_users, listed
from trainwright.core.rng import rng_preserved
from trainwright.data.row_batches import Batches
from trainwright.data.sharding import Sharded
from trainwright.tools.finding import Finding
from trainwright.tools.watching import Read, Recording

MANY_ROWS = 8
"""Rows of a batch from which on a loop over them is looked for: of fewer, other dimensions are often as long."""
ROWS, SECONDS = 6, 1.0
"""Rows that are fetched, and the time after which no further one is."""


def of_reads(seen: Recording, *, updates: int) -> list[Finding]:
    """Lines of the user's own that read a number of the step at least once an update."""
    lines = [read for read in seen.reads.values() if read.times >= updates]
    if not lines:
        return []
    shown = [f"{read.place} `{_source(read)}`" for read in lines]
    return [
        Finding(
            "read in every step",
            f"the host reads numbers of the step in every update: {listed(shown)}",
            "on a GPU the host waits there for all that is enqueued, and the device then waits for the host; "
            "on a CPU it costs a microsecond",
            'self.log("name", tensor)  # keeps it on the device and reads it once per epoch',
            tuple(read.place for read in lines),
        )
    ]


def of_row_loops(seen: Recording) -> list[Finding]:
    """Lines that take at least half of the rows of all batches one by one."""
    lines = [place for place, rows in seen.row_loops.items() if 2 * rows >= seen.rows]
    if not lines or not seen.rows:
        return []
    shown = [f"{_short(place)} `{linecache.getline(*place).strip()}`" for place in lines]
    return [
        Finding(
            "Python loop over rows",
            f"the rows of a batch are taken one by one: {listed(shown)}",
            "each row makes its own calls and kernels: a batch takes nearly as many times as long as it has rows",
            "self.model(x)  # all rows in one call; torch.vmap(f)(x) for an f of one row; padding where lengths differ",
            tuple(map(_short, lines)),
        )
    ]


def loader_findings(data: Any) -> list[Finding]:
    """What is found while a few rows of map-style data are fetched in this process; nothing is said of streams.

    A copy: `torch.tensor(x)` of an array or a tensor of more than one number, of the type that it has already, in
    every row. A file read again: the same path opened once a row, after the first row.
    """
    source = _rows_and_collate(data)
    if source is None:
        return []
    fetch, size = source
    copies = _Copies()
    with rng_preserved(), _opened_files() as opened, copies:
        rows = _fetched(fetch, size)
    if rows < 2:
        return []
    return [*_copied(copies, rows), *_read_again(opened, rows)]


class _Copies(TorchFunctionMode):
    """Notes the lines that copy what could be taken as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[tuple[str, int]] = Counter()
        self.piled: set[tuple[str, int]] = set()
        """Those that copy number by number: lists of arrays."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Carry the function out; note a copy."""
        returned = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "tensor" and isinstance(returned, Tensor) and returned.numel() > 1:
            frame, given = sys._getframe(1), args[0] if args else None
            if is_users(frame.f_code.co_filename) and (_same_type(given, returned) or _piled(given)):
                place = frame.f_code.co_filename, frame.f_lineno
                self.lines[place] += 1
                if _piled(given):
                    self.piled.add(place)
        return returned


def _copied(copies: _Copies, rows: int) -> Iterator[Finding]:
    lines = [place for place, times in copies.lines.items() if times >= rows or place in copies.piled]
    if not lines:
        return
    shown = [f"{_short(place)} `{linecache.getline(*place).strip()}`" for place in lines]
    piled = any(place in copies.piled for place in lines)
    yield Finding(
        "rows copied by torch.tensor",
        f"torch.tensor copies what is an array or a tensor already: {listed(shown)}",
        "each row is copied once more before it is collated"
        + ("; a list of arrays is even read number by number" if piled else ""),
        "torch.from_numpy(np.stack(arrays))" if piled else "torch.as_tensor(x)  # shares its memory: do not write to x",
        tuple(map(_short, lines)),
    )


def _read_again(opened: Mapping[tuple[str, str, int], int], rows: int) -> Iterator[Finding]:
    found = {key: times for key, times in opened.items() if times >= rows}
    if found:
        lines = list(dict.fromkeys((file, line) for _, file, line in found))
        paths = list(dict.fromkeys(os.path.basename(path) for path, _, _ in found))
        shown = [f"{_short(place)} `{linecache.getline(*place).strip()}`" for place in lines]
        yield Finding(
            "file opened for every row",
            f"{listed(paths)} is opened anew for each row: {listed(shown)}",
            "opening, and what is read or decoded after it, is repeated for each row of the data",
            "self.rows = np.load(path, mmap_mode='r')  # once, in __init__; or batches(..., in_memory=True)",
            tuple(map(_short, lines)),
        )


def _rows_and_collate(data: Any) -> tuple[Callable[[Sequence[int]], Any], int] | None:
    """What fetches rows by their numbers and puts them together, and how many rows there are; None for the rest."""
    data = data.data if isinstance(data, Sharded) else data
    if isinstance(data, Batches):
        rows: Any = data._data
        return (lambda numbers: rows.fetch(0, 0, list(numbers)), len(rows)) if hasattr(rows, "dataset") else None
    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
            return None
        collate, data = data.collate_fn, data.dataset
    known = isinstance(data, list | tuple | dict | str | bytes | Tensor | np.ndarray | IterableDataset)
    if known or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return None
    return lambda numbers: collate([data[number] for number in numbers]), len(data)


def _fetched(fetch: Callable[[Sequence[int]], Any], size: int) -> int:
    """Fetch a few rows one by one, as long as there is time; return how many."""
    begun, rows = time.perf_counter(), 0
    for number in range(min(ROWS, size)):
        fetch([number])
        rows += 1
        if rows > 1 and time.perf_counter() - begun > SECONDS:
            break
    return rows


@contextmanager
def _opened_files() -> Iterator[Counter[tuple[str, str, int]]]:
    """Count what is opened inside: by path, and the user's own line that it comes from.

    `open` is replaced for as long as a few rows are fetched: an audit hook could never be taken away again, and a
    profiler is not told what is opened.
    """
    counted: Counter[tuple[str, str, int]] = Counter()
    whole = builtins.open, io.open

    def counting(file: Any, *args: Any, **kwargs: Any) -> Any:
        frame = _user_frame(sys._getframe(1))
        if frame is not None and isinstance(file, str | bytes | os.PathLike):
            counted[os.fsdecode(os.fspath(file)), frame.f_code.co_filename, frame.f_lineno] += 1
        return whole[0](file, *args, **kwargs)

    builtins.open, io.open = counting, counting
    try:
        yield counted
    finally:
        builtins.open, io.open = whole


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own that lies inside of the fetching of a row."""
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def _same_type(given: Any, returned: Tensor) -> bool:
    """Whether an array or a tensor was copied without a change of its type."""
    if isinstance(given, Tensor):
        return given.dtype == returned.dtype
    return isinstance(given, np.ndarray) and str(returned.dtype).removeprefix("torch.") == given.dtype.name


def _piled(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) > 1 and isinstance(given[0], np.ndarray) and given[0].size > 1


def _short(place: tuple[str, int]) -> str:
    return f"{place[0].rpartition('/')[2]}:{place[1]}"


def _source(read: Read) -> str:
    return linecache.getline(read.file, read.line).strip() or read.name
