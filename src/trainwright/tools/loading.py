"""The techniques that `advise` tries on the user's own data: workers, pinned memory, reading ahead, rows in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright.core.device import usable_cores
from trainwright.core.errors import TrainwrightError
from trainwright.data.batches import batches
from trainwright.data.row_batches import Batches
from trainwright.data.sources import open_source
from trainwright.data.transforms.prefetching import prefetch
from trainwright.tools.measuring import Way
from trainwright.tools.ways import Technique, bound
from trainwright.trainer import Trainer

MANY = 8
"""The most workers that are tried, where there are cores for them."""


def loader_techniques(trainer: Trainer[Any], train: Any, *, seconds_per_row: float, patience: float) -> list[Technique]:
    """What may be switched for these data; `patience`: the most seconds that reading them whole may take."""
    found = [*_workers(train), _pinned(trainer, train), _ahead(train)]
    found.append(_in_memory(train, seconds_per_row=seconds_per_row, patience=patience))
    return [bound(technique) for technique in found]


def _workers(train: Any) -> Iterator[Technique]:
    cores = usable_cores()
    numbers = [0, *(n for n in (1, 2, 4, MANY) if n <= cores)]
    if not isinstance(train, DataLoader | Batches):
        yield Technique(
            name="workers",
            how="batches(data_set, 64), or DataLoader(data_set, 64, num_workers=2)",
            why_not=f"a {type(train).__name__} of batches has no rows that workers could read",
            against="loader",
        )
        return
    for number in numbers:
        name = f"{number} worker{'' if number == 1 else 's'}"
        how = f"batches(..., workers={number})"
        how = f"DataLoader(..., num_workers={number})" if isinstance(train, DataLoader) else how
        why_not = _why_no_workers(train, number)
        way = None if why_not else Way(name=name, data=open_source(_with_workers(train, number)))
        yield Technique(name=name, how=how, way=way, why_not=why_not, against="loader")


def _why_no_workers(train: Any, number: int) -> str:
    if isinstance(train, Batches):
        if train.in_memory:
            return "a batch is one gather from memory" if number else "it is on"
        return "it is on" if train._settings.workers == number else ""
    if train.num_workers == number:
        return "it is on"
    if type(train) is not DataLoader:
        return f"a {type(train).__name__} is not known to be built as a DataLoader is"
    if isinstance(train.dataset, IterableDataset):
        return "how an iterable data set shares its rows among workers is its own"
    return "a batch is one gather from memory" if type(train.dataset) is TensorDataset else ""


def _with_workers(train: Any, number: int) -> Any:
    """The same data read by so many workers."""
    if isinstance(train, Batches):
        other = copy.copy(train)
        other._settings = replace(train._settings, workers=number)
        return other
    return _rebuilt(train, num_workers=number)


def _rebuilt(loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """A loader of the same rows, order and collate function, with other settings."""
    taken: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout if settings.get("num_workers", loader.num_workers) else 0,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if settings.get("num_workers") else None,
        "generator": loader.generator,
        **settings,
    }
    taken.setdefault("prefetch_factor", loader.prefetch_factor if taken["num_workers"] else None)
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **taken)
    if loader.batch_size is None and loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, **taken)
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **taken)


def _pinned(trainer: Trainer[Any], train: Any) -> Technique:
    name, how = "pinned memory", "DataLoader(..., pin_memory=True)"
    why_not = ""
    if trainer.device.type != "cuda":
        why_not = "it needs a CUDA device"
    elif type(train) is not DataLoader:
        why_not = "it is on: batches go through pinned memory by themselves"
    elif train.pin_memory:
        why_not = "it is on"
    way = None if why_not else Way(name=name, data=open_source(_rebuilt(train, pin_memory=True)))
    return Technique(name=name, how=how, way=way, why_not=why_not, against="loader")


def _ahead(train: Any) -> Technique:
    technique = Technique(name="prefetch", how="prefetch(batches)", against="loader")
    if isinstance(train, DataLoader):
        return _further_ahead(train)
    if isinstance(train, list | tuple | dict) or callable(train):
        return replace(technique, why_not="there is nothing to read ahead")
    if isinstance(train, Batches) and train.in_memory:
        return replace(technique, why_not="a batch is one gather from memory")
    try:
        return replace(technique, way=Way(name="prefetch", data=open_source(prefetch(train))))
    except TrainwrightError:
        return replace(technique, why_not="its workers read ahead")


def _further_ahead(loader: DataLoader[Any]) -> Technique:
    """Twice as many batches ahead of each worker."""
    factor = 2 * (loader.prefetch_factor or 2)
    how = f"DataLoader(..., num_workers={loader.num_workers or 1}, prefetch_factor={factor})"
    technique = Technique(name="prefetch", how=how, against="loader")
    if not loader.num_workers:
        return replace(technique, why_not="it is workers that read ahead, and there are none")
    if type(loader) is not DataLoader:
        return replace(technique, why_not=f"a {type(loader).__name__} is not known to be built as a DataLoader is")
    return replace(technique, way=Way(name="prefetch", data=open_source(_rebuilt(loader, prefetch_factor=factor))))


def _in_memory(train: Any, *, seconds_per_row: float, patience: float) -> Technique:
    technique = Technique(
        name="in memory", how="batches(data_set, ..., in_memory=True)", against="loader", same_numbers=False
    )
    if not isinstance(train, DataLoader | Batches):
        return replace(technique, why_not="there is no map-style data set to be read")
    source: Any = open_source(train)
    data_set: Any = train.dataset if isinstance(train, DataLoader) else getattr(train._data, "dataset", None)
    if source.in_memory or type(data_set) is TensorDataset:
        return replace(technique, why_not="it is on")
    if data_set is None or isinstance(data_set, IterableDataset):
        return replace(technique, why_not="there is no map-style data set to be read")
    whole = 2 * seconds_per_row * len(data_set)
    if whole > patience:
        return replace(technique, why_not=f"to read all rows twice takes {whole:.0f} s or so; try it by hand")
    try:
        read = batches(data_set, source.batch_size or 1, shuffle=True, seed=0, in_memory=True)
    except TrainwrightError as error:
        return replace(technique, why_not=str(error).splitlines()[0])
    return replace(technique, way=Way(name="in memory", data=open_source(read)))
