"""Says before training why a loader cannot be resumed exactly inside an epoch, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright.data.dataloader.pool import Workers
from trainwright.data.dataloader.proxy import has_twin, iterates_itself
from trainwright.data.generators import hidden_in, is_stateful


def why_inexact(loader: DataLoader[Any]) -> Iterator[str]:
    """The reasons, each with what to do about it."""
    name, data_name = type(loader).__name__, type(loader.dataset).__name__
    same = "exact only if they give the same again"
    if is_stateful(loader):
        if loader.num_workers:
            yield f"random draws in the workers of {name} are as exact as its state_dict makes them"
        return
    if not getattr(loader, "in_order", True) and loader.num_workers:
        yield "in_order=False gives batches as they come: a resume may repeat and leave out rows; write in_order=True"
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers or not is_stateful(loader.dataset):
            yield f"a resume reads the training data ({data_name}) up to where they stood: {same}"
    elif iterates_itself(loader) or not has_twin(loader):
        yield f"a resume reads the training data again ({name} iterates in its own way): {same}"
    elif loader.persistent_workers and not isinstance(getattr(loader, "_iterator", None), Workers | None):
        yield "the persistent workers were started before fit: their random draws do not resume; give fit a new loader"
    hidden = hidden_in(loader.dataset)
    if hidden and not is_stateful(loader.dataset):
        yield f"{hidden} is a generator that no checkpoint holds; give {data_name} state_dict and load_state_dict"
