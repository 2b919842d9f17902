"""Ready batches cut in two and joined: the same rows in smaller and in larger micro-batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.errors import DataError
from trainwright.core.trees import mapping_like, sequence_like
from trainwright.data.cutting import cut, rows_of


def halved(batches: Sequence[Any]) -> list[Any]:
    """Each batch in two, the first half as large as the second or a row larger; DataError where one has one row."""
    found: list[Any] = []
    for batch in batches:
        rows = rows_of(batch, "a batch")
        if rows < 2:
            raise DataError("a batch of one row cannot be cut in two", want="two rows or more")
        middle = (rows + 1) // 2
        found += [compact(cut(batch, part, of=rows)) for part in (range(middle), range(middle, rows))]
    return found


def compact(batch: Any) -> Any:
    """A batch whose tensors are not parts of larger ones: what is kept of it is then what it takes."""
    if isinstance(batch, Tensor):
        return batch.clone() if batch.untyped_storage().nbytes() > batch.nbytes else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: compact(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return sequence_like(batch, map(compact, batch))
    return batch


def joined(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all; containers keep their types. DataError where they do not fit together."""
    first = batches[0]
    if isinstance(first, Tensor | np.ndarray):
        join: Any = torch.cat if isinstance(first, Tensor) else np.concatenate
        return _put_together(join, list(batches)) if first.ndim else first
    if isinstance(first, Mapping):
        return mapping_like(first, {key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, list | tuple):
        return _in_row(first, batches)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        whole = copy.copy(first)
        for field in dataclasses.fields(first):
            object.__setattr__(whole, field.name, joined([getattr(batch, field.name) for batch in batches]))
        return whole
    return first


def _in_row(first: Any, batches: Sequence[Any]) -> Any:
    if not any(isinstance(item, Tensor | np.ndarray | Mapping | list | tuple) for item in first):
        return type(first)(item for batch in batches for item in batch)  # one name, say, for each row
    return sequence_like(first, [joined(list(column)) for column in zip(*batches, strict=True)])


def _put_together(join: Any, parts: list[Any]) -> Any:
    try:
        return join(parts)
    except (RuntimeError, ValueError, TypeError) as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts[:2])
        raise DataError(f"batches of shapes {shapes} cannot be joined", want="rows of one shape") from error
