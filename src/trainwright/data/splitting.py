"""`random_split`: splits a data set into two parts at random, for training and validation."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from trainwright.core.checks import check_whole
from trainwright.core.errors import DataError, SettingError
from trainwright.core.suggestions import suggests
from trainwright.core.trees import sequence_like
from trainwright.data.arrays import table_of
from trainwright.data.seeded import check_rows

D = TypeVar("D")


@suggests
def random_split(data: D, fraction: float, *, seed: int = 0) -> tuple[D, D]:
    """Split a data set at random into two parts; the second part has `fraction` of the rows.

    The second part has `round(fraction * rows)` rows and the first part all others; each has at least one row. Both
    parts are containers of the same type, with copies of their rows in the order of the data; for a `Dataset`, a
    `torch.utils.data.Subset`. The parts depend on the number of rows, `fraction` and `seed` only; global generators are
    not used. For a stratified split, use scikit-learn's `train_test_split(x, y, stratify=y)`.

    >>> from trainwright.data import random_split
    >>> random_split(["a", "b", "c", "d", "e"], 0.4, seed=1)
    (['b', 'c', 'd'], ['a', 'e'])

    Args:
        data: A tensor, an array, a tuple or dict of tensors or arrays of equal length, a list of rows, or a map-style
            `Dataset`.
        fraction: The fraction of rows in the second part, between 0 and 1.
        seed: The seed of the draw.

    Raises:
        DataError: For data without rows.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, float) or not 0 < fraction < 1:
        what, want = f"random_split(data, {fraction!r})", "the share of the second part, a float between 0 and 1"
        raise SettingError(what, want=want, fix="random_split(data, 0.2)")
    check_whole(seed, f"random_split(seed={seed!r})", least=None)
    rows = _number_of_rows(data)
    if rows < 2:
        raise DataError("random_split(data, ...)", have=f"{rows} rows", want="at least two rows, one for each part")
    second = min(max(round(fraction * rows), 1), rows - 1)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return _rows_of(data, order[second:].sort().values), _rows_of(data, order[:second].sort().values)


def _number_of_rows(data: Any) -> int:
    """Return the number of rows; DataError if data are no data set of rows, or columns differ in length."""
    if isinstance(data, Tensor | np.ndarray | tuple | dict):
        table = table_of(data)
        assert table is not None
        return len(table)
    check_rows(data, f"random_split({type(data).__name__}, ...)")
    return len(data)


def _rows_of(data: Any, rows: Tensor) -> Any:
    """Return rows of the data in a container of the same type."""
    if isinstance(data, Tensor):
        return data.index_select(0, rows.to(data.device))
    if isinstance(data, np.ndarray):
        return data[rows.numpy()]
    if isinstance(data, dict):
        return {name: _rows_of(column, rows) for name, column in data.items()}
    if isinstance(data, tuple):
        return sequence_like(data, [_rows_of(column, rows) for column in data])
    if isinstance(data, list):
        return [data[row] for row in rows.tolist()]
    return Subset(data, rows.tolist())
