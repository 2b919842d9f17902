"""A few updates of a trainer as it is or with other settings, after which everything is as it was."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.core.errors import DataError, SettingError, message
from trainwright.core.process_state import kept_switches
from trainwright.core.progress import Counters
from trainwright.core.rng import random_state, set_random_state, unmoved
from trainwright.core.trees import parameters_in
from trainwright.data.batches import Batches
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.generators import Other, knows_its_state
from trainwright.data.rows import choosing
from trainwright.data.sources import beside, open_source
from trainwright.distributed.ddp import DDP
from trainwright.distributed.world import World
from trainwright.fit import setup
from trainwright.fit.lazy import as_schedule
from trainwright.metrics.metrics import Meters
from trainwright.modules.modes import unnoticed
from trainwright.optim.clip import as_clip
from trainwright.optim.named import by_name
from trainwright.precision.mixed_precision import as_precision
from trainwright.trainer import HOOKS, Trainer
from trainwright.update.hooks import Between, overridden, read_hooks
from trainwright.update.loss_tracker import Ledger
from trainwright.update.nonfinite_policy import as_policy
from trainwright.update.owner import networks_of
from trainwright.update.window import accumulation

T = TypeVar("T", bound=Trainer[Any])

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
"""What is put back with what it held, down to the tensors in it; any other object is taken as it is."""


def check_trainer(given: Any, tool: str) -> None:
    """Refuse what is no Trainer in the place of one; `tool` is the function that it was given to."""
    if not isinstance(given, Trainer):
        kind = given.__name__ if isinstance(given, type) else type(given).__name__
        what = f"{tool}({kind}, ...)"
        raise TypeError(message(what, want="a Trainer, and then the data", fix=f"{tool}(trainer, train)"))


@contextmanager
def traceless(trainer: Trainer[Any]) -> Iterator[Kept]:
    """Put back at the end whatever a trial inside may have changed, also after an error.

    That is: parameters, buffers and gradients in the memory that they lie in, each module's mode, hooks and plain
    attributes, `requires_grad`, the optimizers' states and groups, a loss module, frozen modules, the trainer's own
    attributes, its state, counters and history, every random state (generators among those attributes too), and the
    switches of the process (TF32, cudnn.benchmark, threads, the grad mode). What other objects of the user's own hold
    is theirs. SettingError for layers that have no shape yet (`nn.LazyLinear`). Yields what is kept: `put_back()` goes
    back before the end, to run one trial after another from the same state. The copies lie in the memory of the host.
    """
    kept = Kept(trainer)
    with kept_switches():
        try:
            yield kept
        finally:
            kept.put_back()


def variant(trainer: T, **settings: Any) -> T:
    """Return a trainer of the same class, model and optimizers with other settings, for a trial of a few updates.

    It has counters, history and numbers of its own, is silent, and has no checkpoint, early stopping, schedule,
    average, clip, observers or metrics beyond what `settings` name, by the keywords of `Trainer`; `precision`,
    `accumulate`, `clip`, `on_nonfinite` and `fast` stay where they are not named. SettingError in a group of several
    processes, and for a model in shards: a trial is of one process.
    """
    if trainer.world.size > 1 or trainer.parallel.shards:
        what = "a trial in a group of processes, or of a model in shards"
        raise SettingError(what, want="one process", fix="call it in a run of its own: python script.py")
    twin = copy.copy(trainer)
    twin.world, twin.parallel = World(), DDP()
    for name, value in {**_LEFT_OUT, **settings}.items():
        if name not in _SETTINGS:
            raise SettingError(f"variant({name}=...)", want=f"one of {', '.join(sorted(_SETTINGS))}")
        setattr(twin, name, _SETTINGS[name](twin, value))
    twin.hooks = read_hooks(twin, overridden(type(twin), Trainer, HOOKS))
    twin.between, twin.counters, twin.history = Between(looks=False), Counters(), []
    twin.ledger = Ledger(Meters(twin.metrics) if twin.metrics else None, twin.hooks)
    twin.result = None
    twin.hold(setup.NOT_RUNNING, setup.NOT_RUNNING)
    return twin


_LEFT_OUT: dict[str, Any] = dict.fromkeys(("checkpoint", "early_stopping", "schedule", "average", "on_error")) | {
    "observers": (),
    "metrics": None,
}
_SETTINGS: dict[str, Any] = {
    "precision": lambda twin, value: as_precision(value, twin.device),
    "accumulate": lambda _, value: accumulation(value),
    "clip": lambda twin, value: by_name(value, as_clip, what="clip", optimizers=twin.optimizers),
    "schedule": lambda twin, value: by_name(value, as_schedule, what="schedule", optimizers=twin.optimizers),
    "on_nonfinite": lambda _, value: as_policy(value),
    "fast": lambda _, value: setup.checked_fast(value),
    "metrics": lambda twin, value: setup.checked_metrics(value, twin.world),
    "observers": lambda _, value: setup.checked_observers(value),
    "average": lambda _, value: value,
    "checkpoint": lambda _, value: value,
    "early_stopping": lambda _, value: value,
    "on_error": lambda _, value: value,
    "on_oom": lambda _, value: value,
}
"""What makes of each setting what the trainer keeps of it."""


def ready(trainer: Trainer[Any], data: Any, *, updates: int, batch_size: int | None = None) -> list[Any]:
    """Return host batches for so many updates, drawn from the data as `fit` would, without a trace in them.

    Data of fewer batches are gone round again. DataError for a stream that cannot be read afresh, with the cure.
    """
    number = updates * max(each for _, each in trainer.accumulate)
    with unmoved():
        source = open_afresh(data, batch_size=batch_size)
        with unmoved(getattr(source, "generators", ())), data_kept(data):
            found = list(islice(source.epoch(0), number))
    if not found:
        raise DataError("data without a batch", want="at least one batch")
    return [found[index % len(found)] for index in range(number)]


def open_afresh(data: Any, *, batch_size: int | None = None, role: str = "train") -> Any:
    """Open data that a trial may read from their start, and `fit` afterwards again; DataError for others.

    Workers that the data keep from one pass to the next are left alone: a trial has its own.
    """
    source: Any = beside(open_source(data, batch_size=batch_size, shuffle=True, role=role))
    if source.repeatable and not _is_one_pass(data):
        if isinstance(source, LoaderBatches):
            source.keep_workers(keeps=False)
        elif isinstance(source, Batches):
            source._chosen = choosing(source._data, source._dealing.workers)
        return source
    raise DataError(
        f"{role} data that can be read only once, or go on where they were left: a trial would use them up",
        have=f"a {type(data).__name__}",
        want="data that start anew each time they are read",
        fix="a list of ready batches: list(itertools.islice(stream, 50))",
    )


@contextmanager
def data_kept(data: Any) -> Iterator[None]:
    """Put back at the end what a data set of the user's own tells of its state, by `state_dict`."""
    asked = data._asked if isinstance(data, Batches) else None
    found: Any = asked.data if asked is not None else getattr(data, "dataset", data)
    if not (issubclass(type(found), Dataset) and knows_its_state(found)):
        yield
        return
    state = copy.deepcopy(found.state_dict())
    try:
        yield
    finally:
        found.load_state_dict(state)


def _is_one_pass(data: Any) -> bool:
    """Whether reading moves what the next reader gets: an iterator is its own, a data set may have kept one."""
    if hasattr(data, "__next__"):
        return True
    if isinstance(data, DataLoader):
        data = data.dataset if not data.num_workers else None  # each worker has a copy
    if not isinstance(data, IterableDataset):
        return False
    with unmoved():
        kept = iter(data)
        return kept is not data and iter(data) is kept


class Kept:
    """What a trial may change, as it was, with the way back."""

    def __init__(self, trainer: Trainer[Any]) -> None:
        self._counters, self._progress = trainer.counters, trainer.counters.state_dict()
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        self._generators: dict[int, tuple[Any, Any]] = {}
        tensors: dict[int, Tensor] = {}
        optimizers, modules = trainer.optimizers.values(), _modules_of(trainer)
        _refuse_lazy(modules)
        for owner in (trainer, *modules, *optimizers):
            self._walk(vars(owner), tensors)
            for name in _slots_of(type(owner)):
                self._slots.append((owner, name, getattr(owner, name, _NOTHING)))
                self._walk(self._slots[-1][-1], tensors)
        for parameter in parameters_in(*optimizers):
            tensors[id(parameter)] = parameter
        self._tensors = _Tensors(list(tensors.values()))
        self._random = random_state()

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept: weights, buffers, gradients, states."""
        return self._tensors.found

    def put_back(self) -> None:
        """Make everything what it was; the copies are kept, so that this may be done again."""
        with ExitStack() as last:
            last.callback(set_random_state, self._random)
            for container, held in self._containers.values():
                _refill(container, held)
            for owner, name, value in self._slots:
                _set_slot(owner, name, value)
            for generator, state in self._generators.values():
                generator.set_state(state)
            self._counters.load_state_dict(self._progress)
            self._tensors.put_back()

    def _walk(self, value: Any, tensors: dict[int, Tensor]) -> None:
        """Note a container with what it holds, and the tensors in it, down to the last."""
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, LRScheduler):  # one that a hook steps; its optimizer is kept by itself
            self._walk(vars(value), tensors)
        elif type(value) in _CONTAINERS and id(value) not in self._containers:
            self._containers[id(value)] = (value, copy.copy(value))
            for one in value.values() if isinstance(value, dict) else value:
                self._walk(one, tensors)
        elif type(value) is tuple:
            for one in value:
                self._walk(one, tensors)
        elif type(value) is np.ndarray and value.flags.writeable:
            self._containers[id(value)] = (value, value.copy())
        elif isinstance(value, _GENERATORS):
            generator = value if isinstance(value, torch.Generator) else Other(value)
            self._generators[id(value)] = (generator, generator.get_state())


class _Tensors:
    """Tensors in the memory that they lie in, with their gradients."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf]
        self._gradients = [(t, t.requires_grad, t.grad) for t in tensors if t.is_leaf]
        self.found = [*tensors, *(gradient for gradient in gradients if gradient is not None)]
        self._memory = [tensor.detach() for tensor in self.found]
        self._values = [_once(tensor.detach()).to("cpu", copy=True) for tensor in self.found]
        self._hidden = unnoticed(self.found)  # who looks whether weights were changed finds that they were not

    @torch.no_grad()
    def put_back(self) -> None:
        """Values, memory, `requires_grad` and gradients."""
        with self._hidden:
            for tensor, memory, value in zip(self.found, self._memory, self._values, strict=True):
                if _has_memory(tensor) and (
                    tensor.data_ptr() != memory.data_ptr() or tensor.stride() != memory.stride()
                ):
                    tensor.data = memory
                with torch.inference_mode() if tensor.is_inference() else nullcontext():
                    _once(tensor).copy_(value)
        for tensor, trained, gradient in self._gradients:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if tensor.grad is not gradient:
                tensor.grad = gradient


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies in one piece of memory of its own; a sparse or nested one is made of several."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _once(tensor: Tensor) -> Tensor:
    """The tensor with each number once, where it was expanded: one is written for all."""
    if not _has_memory(tensor):
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _refuse_lazy(modules: Sequence[nn.Module]) -> None:
    """Refuse layers whose weights have no shape yet: their first batch makes others of them, for good."""
    lazy = [type(module).__name__ for module in modules if _is_lazy(module)]
    if lazy:
        what = f"a trial of layers that have no shape yet: {', '.join(sorted(set(lazy)))}"
        fix = "run a batch through the model first: with torch.no_grad(): model(inputs)"
        raise SettingError(what, want="layers whose weights are made", fix=fix)


def _is_lazy(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(isinstance(one, nn.UninitializedParameter | nn.UninitializedBuffer) for one in own)


def _modules_of(trainer: Trainer[Any]) -> list[nn.Module]:
    return [module for root in networks_of(trainer) for module in root.modules()]


def _slots_of(kind: type) -> list[str]:
    """The names of what objects of a class hold beside their `__dict__`."""
    found: list[str] = []
    for one in kind.__mro__:
        own = vars(one).get("__slots__", ())
        found += (name for name in ([own] if isinstance(own, str) else own) if name not in ("__dict__", "__weakref__"))
    return [name for name in found if not name.startswith("__")]


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if value is not _NOTHING:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


_NOTHING: Any = object()
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _refill(container: Any, held: Any) -> None:
    """Make a list, dict, set, deque or array hold what a copy of it does."""
    if isinstance(container, np.ndarray):
        container[...] = held
        return
    if isinstance(container, list):
        container[:] = held
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(held)
    else:
        container.update(held)
