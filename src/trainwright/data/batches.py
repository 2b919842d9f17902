"""`batches(...)`: cuts a data set into batches, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainwright.core.checks import check_flag
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.data.row_batches import Batches, BatchSettings
from trainwright.data.seeded import rows_of


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
    augment: Any = None,
) -> Batches:
    """Batches of `batch_size` rows of a data set; each pass over the result is the next epoch.

    `data` is a map-style `Dataset`, a tensor, an array, or a tuple or dict of equally long ones; a batch of arrays
    is the same container of tensors. The order is a function of (seed, epoch); `seed=None` is drawn once from
    torch's global generator at the first pass and saved in the state. A data set's own random draws depend on
    (seed, epoch, row), and leave the generators of the process as they were. `sampler` gives row numbers instead.
    `batch_size` counts rows over all processes of a run, each of which runs its part of every batch; `per_rank`, in
    its place, counts those of each, and such a run resumes only on as many processes. `workers` is the number of
    worker processes that fetch rows: neither the order nor a number depends on it. `in_memory=True` reads a small data
    set, whose rows are always the same, once into memory. `augment` changes images on the device of the run:
    `Augment(...)`, `Normalize(...)`, a function of (images, draws), or a list of these. Raises DataError for data
    without a batch.
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
        from trainwright.data.reading import read_whole

        rows: Any = read_whole(data, collate=collate, workers=workers)
    else:
        rows = rows_of(data, collate)
    if augment is None:
        return Batches(rows, settings, sampler)
    from trainwright.data.transforms.augmented import AugmentedBatches

    return AugmentedBatches(rows, settings, sampler, augment=augment)


def _check_sampler(sampler: Any, *, shuffle: bool) -> None:
    """Refuse a sampler beside `shuffle`, and one that can be iterated once."""
    if shuffle:
        raise SettingError("batches(shuffle=True, sampler=...)", want="one of the two", fix="leave one out")
    if hasattr(sampler, "__next__") or not hasattr(sampler, "__iter__"):
        raise SettingError(
            f"batches(sampler={type(sampler).__name__})",
            want="row numbers that can be iterated anew in each epoch",
            fix="a list, or an object of a torch Sampler class",
        )
