"""Looks whether the workers of a loader over a stream give the same batches, since each of them reads all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor

_END = object()


def looked_at(batches: Iterator[Any], *, workers: int, name: str) -> Iterator[Any]:
    """The batches as they come, in turn from `workers`; a warning where the first two of each are those of all.

    Both rounds must be equal bit for bit, and differ from each other, as no data do that merely repeat a batch.
    """
    rounds: list[Any] = []
    for place in range(2 * workers):
        batch = next(batches, _END)
        if batch is _END:
            return
        alike = bool(place % workers) and same_bits(batch, rounds[-1])
        if not place % workers:
            rounds.append(batch)
        yield batch
        if place % workers and not alike:
            break
    else:
        if not same_bits(*rounds):
            warn(
                f"all {workers} workers give the same batches: each reads all of {name}, and every row comes "
                f"{workers} times; in its __iter__: index, total = shard(); "
                "return itertools.islice(rows, index, None, total)",
                stacklevel=2,
            )
    yield from batches


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nested batches are alike in every type, shape, stride and bit; False where that is not known."""
    return type(one) is type(other) and _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray | np.generic):
        alike = one.dtype == other.dtype and one.dtype != object and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if is_dataclass(one) and not isinstance(one, type):
        return all(same_bits(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    known = isinstance(one, str | bytes | int | float | None)
    return known and repr(one) == repr(other)


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
