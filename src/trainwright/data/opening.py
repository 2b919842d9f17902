"""`open_source`, which opens data of any form as a source of batches, and `batches`, for the rows of a data set."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.core.checks import check_flag
from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.data.row_batches import Batches, BatchSettings
from trainwright.data.seeded import open_rows, read_into_memory
from trainwright.data.sharding import Sharded, matches_environment, reading_part
from trainwright.data.source import Source, shallow_copy
from trainwright.distributed.mesh import Shard

_FORMS = (
    "batches(...), a DataLoader, a Dataset, a tensor or array or a tuple of them with batch_size, "
    "an iterable of batches, or a function epoch -> one of these"
)


EVALUATION_BATCH = 256
"""The default batch size of evaluations and predictions; results do not depend on it."""


def open_source(data: Any, *, batch_size: int | None = None, shuffle: bool = False, role: str = "train") -> Source:
    """Return a source of the batches of `data`; DataError if there are none, or for an unsupported form.

    `batch_size` and `shuffle` are for data sets of rows (see `takes_batch_size`). With ready batches, `batch_size`
    raises DataError, and `shuffle` is ignored. Only the role "train" requires a batch size. A function `epoch -> data`
    is called for epoch 0 immediately. A `Source` is returned unchanged, but unsharded.
    """
    if not isinstance(data, Source):
        return _open(data, batch_size, shuffle=shuffle, role=role)
    if batch_size is not None:
        raise _no_rows(data, batch_size, role)
    if data._part is not None:  # sharded by an earlier run
        data.shard(None)
    return data


def _open(data: Any, batch_size: int | None, *, shuffle: bool, role: str) -> Source:
    if isinstance(data, Sharded):
        return mark_as_own_part(open_source(data.data, batch_size=batch_size, shuffle=shuffle, role=role), role)
    if is_together(data):
        zipped: Source = data.source(batch_size=batch_size, shuffle=shuffle, role=role)
        return zipped
    _refuse_other_objects(data, role)
    if is_function(data):
        return PerEpoch(data, batch_size=batch_size, shuffle=shuffle, role=role)
    if takes_batch_size(data):
        return _open_data_set(data, batch_size, shuffle=shuffle, role=role)
    if batch_size is not None:
        raise _no_rows(data, batch_size, role)
    from trainwright.data.dataloader.loader import LoaderBatches
    from trainwright.data.streams import ReadyBatches

    return LoaderBatches(data, role) if isinstance(data, DataLoader) else ReadyBatches(data, role)


@suggests
def batches(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    sampler: Iterable[int] | None = None,
    per_rank: int | None = None,
    workers: int = 0,
    in_memory: bool = False,
) -> Batches:
    """Return the rows of a data set in batches of `batch_size`.

    The order depends on (seed, epoch) only. Random draws of the data set depend on (seed, epoch, row) only, and do not
    change global generators. If the result is iterated directly, each pass is the next epoch. A `fit` always starts
    with epoch 0, so that a second `fit` repeats the orders of the first.

    Args:
        data: A map-style `Dataset`, a tensor, an array, or a tuple or dict of tensors or arrays of equal length. A
            batch of arrays is the same container, with tensors.
        batch_size: Rows per batch, over all processes of a run; each process runs its slice of every batch.
        shuffle: Whether to shuffle the rows in each epoch.
        seed: The seed. None: drawn once from torch's global generator at the first pass, and saved in the state.
        drop_last: Whether to drop a short last batch.
        collate: A function from a list of rows to a batch. None: torch's `default_collate`.
        sampler: Row indices in a custom order, instead of `shuffle`.
        per_rank: Rows per batch and process, instead of `batch_size`. Such a run can be resumed only with the same
            number of processes.
        workers: The number of worker processes that fetch rows. It affects neither order nor values.
        in_memory: Whether to read a small data set, whose rows never change, into memory once.

    Raises:
        DataError: For data without a batch.
    """
    settings = BatchSettings(
        batch_size=batch_size, per_rank=per_rank, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers
    )
    if collate is not None and not callable(collate):
        raise SettingError(f"collate={collate!r}", want="a function from a list of rows to a batch")
    check_flag(in_memory, f"batches(in_memory={in_memory!r})")
    if sampler is not None:
        _check_sampler(sampler, shuffle=shuffle)
    if in_memory:
        rows: Any = read_into_memory(data, collate=collate, workers=workers)
    else:
        rows = open_rows(data, collate)
    return Batches(rows, settings, sampler)


def takes_batch_size(data: Any) -> bool:
    """Return whether `data` is a data set of rows, or a function that may return one, rather than ready batches."""
    if isinstance(data, Sharded):
        return takes_batch_size(data.data)
    if is_together(data):
        return any(map(takes_batch_size, data.loaders.values()))
    if isinstance(data, Tensor | np.ndarray | tuple | dict) or is_function(data):
        return True
    if isinstance(data, Batches | DataLoader | IterableDataset):
        return False
    rows_by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__")
    return isinstance(data, Dataset) or hasattr(data, "__getitems__") or rows_by_index


class PerEpoch(Source):
    """A function `epoch -> data`, called once per epoch; length and rows are those of the current epoch."""

    kind = "a function of the epoch"
    draws_global_rng = True

    def __init__(self, make: Any, *, batch_size: int | None, shuffle: bool, role: str) -> None:
        self._make = make
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._role = role
        with nullcontext() if role == "train" else rng_preserved():  # training draws as a plain loop does
            self._data = _call(make, 0, role)
        self._source = self._open(self._data)
        self._epoch = 0
        self._fresh = True
        """Whether no batch of the current data was read yet."""
        self._measure()

    def inner(self) -> Mapping[str, Source]:
        """Return the source of the current data."""
        return {"": self._source}

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches."""
        self._source.shard(part)
        self._part = part
        self._measure()

    def independent_copy(self) -> PerEpoch:
        """Return a copy that calls the function again, since some data can be read only once."""
        other = shallow_copy(self)
        other._source, other._fresh = self._source.independent_copy(), False
        return other

    def describe(self) -> str:
        """Return a description of the current data."""
        return f"{self._source.describe()}, made for each epoch"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of the data that the function returns for `epoch`."""
        place = Shard(0, 1) if self._part is None else self._part
        # When the data were opened, `shard()` in the function used the rank of the environment.
        same = self._fresh and epoch == self._epoch and (not self.is_own_part or matches_environment(place))
        if not same:
            with reading_part(place):
                data = _call(self._make, epoch, self._role)
            same = data is self._data
            if not same:
                self._data, self._source = data, self._open(data)
                self._measure()
        sought, self._sought = self._sought, None
        # A state of another epoch fits only if all epochs share the same data.
        if sought is not None and (same or sought["epoch"] == epoch):
            self._source.seek(sought["source"], other_size=self._other_size)
        self._epoch, self._fresh = epoch, False
        return self._source.epoch(epoch, skip)

    def _position(self) -> dict[str, Any]:
        """Return the current epoch and the position in its data."""
        return {"epoch": self._epoch, "source": self._source.position()}

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Set the data to a saved position, if no epoch follows."""
        if ended:  # relevant for data that all epochs share, which another `fit` may read
            data = _call(self._make, position["epoch"], self._role)
            source = self._source if data is self._data else self._open(data)
            source.seek(position["source"], other_size=self._other_size, ended=True)
        return self.other_size_note if self._other_size else None

    def _measure(self) -> None:
        self.length, self.rows = self._source.length, self._source.rows
        self.batch_size = self._source.batch_size

    def _open(self, data: Any) -> Source:
        if is_function(data):
            raise _no_data(data, f"{self._role} data: the function epoch -> data returned another function")
        source = open_source(data, batch_size=self._batch_size, shuffle=self._shuffle, role=self._role)
        source.must_resume = self.must_resume
        if self.is_own_part:
            mark_as_own_part(source, self._role)
        if self._part is not None:
            source.shard(self._part)
        return source


def _call(make: Any, epoch: int, role: str) -> Any:
    try:
        inspect.signature(make).bind(epoch)
    except TypeError as error:
        raise DataError(
            f"{role} data: the function cannot be called with the epoch",
            have=str(error),
            want="a function of one argument, the epoch from 0",
            fix=f"lambda epoch: {getattr(make, '__name__', 'make')}()",
        ) from None
    except ValueError:
        pass  # a built-in function without a signature
    return make(epoch)


def is_function(data: Any) -> bool:
    """Return whether data are a function of the epoch."""
    data_like = any(hasattr(data, name) for name in ("__iter__", "__getitem__"))
    return callable(data) and not data_like and not isinstance(data, type | nn.Module)


def is_together(data: Any) -> bool:
    """Return whether data are a `Together`, without an import of its module."""
    zipped: Any = sys.modules.get("trainwright.data.transforms.zipped")
    return zipped is not None and isinstance(data, zipped.Together)


def mark_as_own_part(source: Any, role: str) -> Source:
    """Mark a source as this rank's part of the data, and return it; DataError for a custom source."""
    if not type(source).__module__.startswith("trainwright."):
        name = type(source).__name__
        raise DataError(
            f"{role} data: sharded({name}(...)), a source of your own",
            want="a loader, an iterable of batches, or a function epoch -> one of these",
            fix=f"def shard(self, part) in {name}, after which epoch(...) yields a Slice(batch, None, None) for each",
        )
    source.is_own_part = True
    for one in source.inner().values():
        mark_as_own_part(one, role)
    marked: Source = source
    return marked


def _check_sampler(sampler: Any, *, shuffle: bool) -> None:
    """Raise SettingError for a sampler together with `shuffle`, and for one that can be iterated only once."""
    if shuffle:
        raise SettingError("batches(shuffle=True, sampler=...)", want="one of the two", fix="leave one out")
    if hasattr(sampler, "__next__") or not hasattr(sampler, "__iter__"):
        raise SettingError(
            f"batches(sampler={type(sampler).__name__})",
            want="row numbers that can be iterated again in each epoch",
            fix="a list, or an object of a torch Sampler class",
        )


def _open_data_set(data: Any, batch_size: int | None, *, shuffle: bool, role: str) -> Source:
    if batch_size is not None or role != "train":
        return batches(data, EVALUATION_BATCH if batch_size is None else batch_size, shuffle=shuffle)
    raise DataError(
        f"{role} data: {_with_article(data)} is a data set of rows, without a batch size",
        want="a batch size, or ready batches (a list is batches)",
        fix="batch_size=64, or batches(data, 64) in place of the data",
    )


def _no_rows(data: Any, batch_size: int, role: str) -> DataError:
    """Return the error for a batch size together with ready batches."""
    fix = "batches(data, ...) if its items are rows" if hasattr(data, "__getitem__") else "leave batch_size out"
    if isinstance(data, IterableDataset):
        fix = f"DataLoader(data, batch_size={batch_size})"
    return DataError(
        f"{role} data: batch_size={batch_size} with {_with_article(data)}, which has batches already",
        want="batch_size only with a data set of rows",
        fix=fix,
    )


def _refuse_other_objects(data: Any, role: str) -> None:
    if isinstance(data, type):
        raise _no_data(data, f"{role} data: the class {data.__name__} itself", fix=f"{data.__name__}(...)")
    if hasattr(data, "iloc"):
        raise _no_data(data, f"{role} data: a table of pandas", fix="data.to_numpy()")
    if callable(getattr(data, "epoch", None)):
        fix = f"class {type(data).__name__}(Source):   # from trainwright.data.source import Source"
        raise _no_data(data, f"{role} data: {_with_article(data)} has epoch(), and is no Source", fix=fix)
    iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__") or callable(data)
    if isinstance(data, str | bytes | Number | nn.Module) or not iterable:
        raise _no_data(data, f"{role} data: {_with_article(data)} is no source of batches")


def _no_data(data: Any, what: str, fix: str = "") -> DataError:
    return DataError(what, have=repr(data)[:80], want=_FORMS, fix=fix)


def _with_article(data: Any) -> str:
    name = type(data).__name__
    return f"{'an' if name[0] in 'AEIOaeiou' else 'a'} {name}"
