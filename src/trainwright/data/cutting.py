"""Cuts a ready batch along its rows, where each process runs a part of a batch that all of them have read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainwright.core.errors import DataError
from trainwright.core.trees import mapping_like, sequence_like
from trainwright.distributed.mesh import Shard, Slice

_PLAIN = (str, bytes, int, float, complex, np.generic, type(None))


def cut_batches(batches: Iterator[Any], part: Shard, name: str) -> Iterator[Slice]:
    """What one process runs of each ready batch; DataError, with `name`, for a batch whose rows are not known."""
    for batch in batches:
        rows = rows_of(batch, name)
        yield Slice(cut(batch, part.run(rows), of=rows), len(part.of(rows)), rows)


def rows_of(batch: Any, name: str) -> int:
    """Rows of a nested batch: what all its tensors and arrays are long in dimension 0; DataError where they differ."""
    leaves = dict(_leaves(batch, "batch"))
    unknown = [f"{at} {kind}" for at, kind in leaves.items() if isinstance(kind, str)]
    lengths = {length for length in leaves.values() if not isinstance(length, str)}
    if unknown or len(lengths) != 1:
        have = unknown or [f"{at} has {length} rows" for at, length in leaves.items()] or ["no tensor in it"]
        raise DataError(
            f"the rows of a ready batch of {name} are not known, and each process is to run a part of them",
            have=", ".join(have[:6]),
            want="tensors and arrays that are equally long in dimension 0, in tuples, lists, dicts or dataclasses",
            fix="batches(rows, 64) or a DataLoader, which deal rows; or sharded(data) of each process's own",
        )
    return int(lengths.pop())


def cut(batch: Any, rows: range, *, of: int) -> Any:
    """Those `rows` of a nested batch `of` so many; containers keep their types, and what has no rows stays whole."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[rows.start : rows.stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: cut(value, rows, of=of) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == of and not any(True for _ in _leaves(batch, "")):
            return sequence_like(batch, list(batch[rows.start : rows.stop]))  # one name, say, for each row
        return sequence_like(batch, [cut(item, rows, of=of) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(part, field.name, cut(getattr(batch, field.name), rows, of=of))
        return part
    return batch


def _leaves(batch: Any, at: str) -> Iterator[tuple[str, int | str]]:
    """Where tensors and arrays are, with their rows; and what nobody knows how to cut, with its type."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield at, batch.shape[0]
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{at}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, item in enumerate(batch):
            yield from _leaves(item, f"{at}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name), f"{at}.{field.name}")
    elif not isinstance(batch, _PLAIN):
        yield at, f"is a {type(batch).__name__}"
