"""Trials: a few updates of a trainer, unchanged or with other settings, with everything restored afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.core.errors import DataError, SettingError, message
from trainwright.core.progress import Counters
from trainwright.core.rng import rng_preserved
from trainwright.core.trees import map_tree
from trainwright.data.data_state import is_stateful
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.opening import open_source
from trainwright.data.row_batches import Batches
from trainwright.distributed.mesh import Parallel
from trainwright.distributed.world import World
from trainwright.fit.arguments import bound_hooks, checked_metrics, checked_schedule
from trainwright.fit.record import NOT_RUNNING, StageRecord
from trainwright.metrics.metric_set import MetricSet
from trainwright.optim.named import by_name
from trainwright.precision.mixed_precision import as_precision
from trainwright.tools.trainer_snapshot import TrainerSnapshot, switches_restored
from trainwright.trainer import HOOKS, Trainer
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.nonfinite_policy import as_policy
from trainwright.update.trainer_like import overridden
from trainwright.update.window import accumulation

T = TypeVar("T", bound=Trainer[Any])


def check_trainer(given: Any, tool: str) -> None:
    """Raise TypeError for anything but a Trainer. `tool`: the called function, for the message."""
    if not isinstance(given, Trainer):
        kind = given.__name__ if isinstance(given, type) else type(given).__name__
        what = f"{tool}({kind}, ...)"
        raise TypeError(message(what, want="a Trainer, and then the data", fix=f"{tool}(trainer, train)"))


@contextmanager
def traceless(trainer: Trainer[Any]) -> Iterator[TrainerSnapshot]:
    """Context that restores all state that trials may change, also after an error.

    Restored are:

    - parameters, buffers and gradients, in their memory; `requires_grad`; mode, hooks and plain attributes of modules;
    - states and groups of optimizers; a loss module; frozen modules;
    - attributes, state, counters and history of the trainer; all random states, with generators in attributes;
    - switches of the process: TF32, cudnn.benchmark, threads, grad mode.

    Contents of other objects of the user are not restored. Yields the snapshot: its `restore()` starts the next trial
    from the same state. The copies are in host memory. SettingError for layers without a shape (`nn.LazyLinear`).
    """
    with switches_restored(), TrainerSnapshot(trainer) as before:
        yield before


def variant(trainer: T, **settings: Any) -> T:
    """Return a trainer with the same class, model and optimizers, and other settings, for a trial of a few updates.

    It has separate counters, history and totals, and prints nothing. `settings`: keywords of `Trainer`. `precision`,
    `accumulate`, `clip`, `on_nonfinite` and `fast` default to those of the trainer; checkpoint, early stopping,
    schedule, average, observers and metrics default to none. SettingError with several ranks.
    """
    if trainer.world.size > 1 or trainer.parallel.shards:
        what = "a trial in a group of processes, or of a model in shards"
        raise SettingError(what, want="one process", fix="call it in a separate run: python script.py")
    twin = copy.copy(trainer)
    twin.world, twin.parallel = World(), Parallel()
    for name, value in {**_LEFT_OUT, **settings}.items():
        setattr(twin, name, _READ[name](twin, value) if name in _READ else value)
    twin._hooks = bound_hooks(twin, overridden(type(twin), Trainer, HOOKS))
    twin._record, twin._counters, twin.history = StageRecord(warns=False), Counters(), []
    twin._tracker = LossTracker(MetricSet(twin.metrics, training=True) if twin.metrics else None, twin._hooks)
    twin.result = None
    twin._bind_run(NOT_RUNNING, NOT_RUNNING)
    return twin


_LEFT_OUT: dict[str, Any] = dict.fromkeys(("checkpoint", "early_stopping", "schedule", "average", "on_error")) | {
    "observers": (),
    "metrics": None,
}
_READ: dict[str, Any] = {
    "precision": lambda twin, value: as_precision(value, twin.device),
    "accumulate": lambda _, value: accumulation(value),
    "schedule": lambda twin, value: by_name(value, checked_schedule, slot="schedule", optimizers=twin.optimizers),
    "on_nonfinite": lambda _, value: as_policy(value),
    "metrics": lambda twin, value: checked_metrics(value, twin.world),
}
"""Conversions of settings that the Trainer takes in several forms."""


def ready(trainer: Trainer[Any], data: Any, *, updates: int, batch_size: int | None = None) -> list[Any]:
    """Return host batches for `updates` updates, as `fit` reads them. The state of the data does not change.

    Shorter data are repeated. DataError for a stream that cannot be read from its start.
    """
    number = updates * max(each for _, each in trainer.accumulate)
    with rng_preserved():
        source = open_afresh(data, batch_size=batch_size)
        with rng_preserved(source.generators), data_state_restored(data):
            found = list(islice(source.epoch(0), number))
    if not found:
        raise DataError("data without a batch", want="at least one batch")
    return [found[index % len(found)] for index in range(number)]


def is_several(val: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether `val` is a dict of validation sets. A dict of arrays or tensors is one set, with its columns."""
    return isinstance(val, dict) and not all(isinstance(one, Tensor | np.ndarray) for one in val.values())


def compact(batch: Any) -> Any:
    """Return a batch without views of larger tensors, which would stay in memory."""

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes
        return leaf.clone() if is_view else leaf

    return map_tree(own, batch)


def joined(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of all batches, in equal containers. DataError for unequal shapes."""
    return map_tree(_joined, *batches, is_leaf=_is_list_of_rows)


def _is_list_of_rows(items: Any, *_: Any) -> bool:
    """Return whether a sequence has one value per row, such as a name."""
    columns = (Tensor, np.ndarray, Mapping, list, tuple)
    return isinstance(items, list | tuple) and not any(isinstance(item, columns) for item in items)


def _joined(first: Any, *others: Any) -> Any:
    if isinstance(first, list | tuple):
        return type(first)(item for items in (first, *others) for item in items)
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        return _put_together(torch.cat if isinstance(first, Tensor) else np.concatenate, [first, *others])
    return first


def _put_together(join: Any, parts: list[Any]) -> Any:
    try:
        return join(parts)
    except (RuntimeError, ValueError, TypeError) as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts[:2])
        raise DataError(f"batches of shapes {shapes} cannot be joined", want="rows of one shape") from error


def open_afresh(data: Any, *, batch_size: int | None = None, role: str = "train") -> Any:
    """Open data that a trial can read from their start, and `fit` again afterwards; else DataError.

    A trial starts separate workers instead of the persistent workers of the data.
    """
    source: Any = open_source(data, batch_size=batch_size, shuffle=True, role=role).independent_copy()
    if source.repeatable and not _is_one_pass(data):
        if isinstance(source, LoaderBatches):
            source.keep_workers(keeps=False)
        return source
    raise DataError(
        f"{role} data that can be read only once, or that continue where they stopped: a trial would use them up",
        have=f"a {type(data).__name__}",
        want="data that start anew each time they are read",
        fix="a list of ready batches: list(itertools.islice(stream, 50))",
    )


@contextmanager
def data_state_restored(data: Any) -> Iterator[None]:
    """Context that restores the state of a data set with `state_dict`."""
    found: Any = data.data_set if isinstance(data, Batches) else getattr(data, "dataset", data)
    if not (issubclass(type(found), Dataset) and is_stateful(found)):
        yield
        return
    state = copy.deepcopy(found.state_dict())
    try:
        yield
    finally:
        found.load_state_dict(state)


def _is_one_pass(data: Any) -> bool:
    """Return whether a pass changes the next pass: data that are, or hold, an iterator."""
    if hasattr(data, "__next__"):
        return True
    if isinstance(data, DataLoader):
        data = data.dataset if not data.num_workers else None  # each worker has a copy
    if not isinstance(data, IterableDataset):
        return False
    with rng_preserved():
        first = iter(data)
        return first is not data and iter(data) is first
