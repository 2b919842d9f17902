"""Whatever `batches` is given as a data set: a table in memory, or rows that are fetched one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright.core.errors import DataError
from trainwright.data.arrays import Table, TableRows, table_of
from trainwright.data.seeded import SeededRows


def rows_of(data: Any, collate: Callable[[list[Any]], Any] | None) -> Table | SeededRows:
    """The rows of `data`, with `collate` where rows are to be put together; DataError where `data` have no rows."""
    table = table_of(data)
    if table is not None:
        return table if collate is None else SeededRows(TableRows(table), collate)
    if isinstance(data, DataLoader | IterableDataset) or not _is_map_style(data):
        raise DataError(
            f"batches({type(data).__name__}, ...): no data set of rows",
            want="a map-style Dataset (len and []), a tensor, an array, or a tuple or dict of equally long ones",
            fix=_instead(data),
        )
    if collate is None:  # which makes rows of any shapes one batch
        _refuse_list_of_columns(data)
    return SeededRows(data, collate)


def choosing(rows: Table | SeededRows, workers: Any) -> Any:
    """What chooses workers where they are "auto" and rows are fetched; None elsewhere."""
    if workers != "auto" or isinstance(rows, Table):
        return None
    from trainwright.data.auto_workers import ChosenWorkers

    return ChosenWorkers(rows)


def _is_map_style(data: Any) -> bool:
    named = isinstance(data, str | bytes | type) or hasattr(data, "iloc")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not named


def _instead(data: Any) -> str:
    if isinstance(data, DataLoader) or callable(getattr(data, "deal", None)):
        return "it has batches already: use it as it is"
    if isinstance(data, IterableDataset):
        return "DataLoader(data, batch_size=...)"
    return "data.to_numpy()" if hasattr(data, "iloc") else ""


def _refuse_list_of_columns(data: Any) -> None:
    if not isinstance(data, list) or not 2 <= len(data) <= 8 or not all(hasattr(one, "shape") for one in data):
        return
    shapes = [tuple(one.shape) for one in data]
    if len(set(shapes)) > 1:
        raise DataError(
            "batches([...]): the items of a list are rows, and these rows differ in shape",
            have=", ".join(map(str, shapes)),
            want="a tuple for the columns of one data set",
            fix="batches((x, y), ...)",
        )
