"""The order of a loader's batches from any position, and a twin of the loader that is iterated in this order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainwright.core.errors import DataError, message
from trainwright.core.rng import host_random_state
from trainwright.core.torch_private import LOADER_HOOKS, iterator_of
from trainwright.data.source import drop_first

if TYPE_CHECKING:
    from trainwright.data.sharding import ShardedIndices

_TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_END = object()


class Order:
    """Wraps a sampler or batch sampler; torch iterates it as it would iterate the original.

    The first `skip` items of a new pass are drawn and dropped, at the first item or in `drop_skipped`. `on_draw` is
    called if an item after the first one has changed a global random state.
    """

    def __init__(self, given: Iterable[Any], *, name: str) -> None:
        self._sampler = given
        self._name = name
        self._rest: _Rest | None = None
        self.shard: Callable[[Iterator[Any]], ShardedIndices] | None = None
        """Shards the indices of a new pass for this rank; None on a single rank."""
        self.sharded: ShardedIndices | None = None
        """The last sharded pass."""
        self.skip = 0
        self.is_empty = False
        """Whether passes are empty, as for the start of persistent workers."""
        self.restarts_if_empty = False
        """Whether to start a new pass if a sampler's loaded state was the end of a pass."""
        self.on_draw: Callable[[], None] | None = None

    def __len__(self) -> int:
        given: Any = self._sampler
        return len(given)

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        numbers = iter(self._sampler)
        if self.restarts_if_empty:
            numbers = restarted_if_empty(self._sampler, numbers)
        if self.on_draw is not None:
            numbers = watch_draws(numbers, self.on_draw)
        if self.skip:
            numbers = self._rest = _Rest(numbers, self.skip, self._name)
        if self.shard is not None:
            numbers = self.sharded = self.shard(numbers)
        return numbers

    def drop_skipped(self) -> None:
        """Draw the skipped items now, from the current random state; on several ranks, make all draws of the pass."""
        if self.shard is not None and self.sharded is not None:
            self.sharded.draw()
        elif self._rest is not None:
            self._rest.drop_skipped()


class _Rest:
    """A pass without its first `skip` items, which are drawn when the first item is requested."""

    def __init__(self, numbers: Iterator[Any], skip: int, name: str) -> None:
        self._numbers = numbers
        self._skip = skip
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._skip:
            self.drop_skipped()
        return next(self._numbers)

    def drop_skipped(self) -> None:
        skip, self._skip = self._skip, 0
        drop_first(self._numbers, skip, self._name)


def watch_draws(numbers: Iterator[Any], on_draw: Callable[[], None]) -> Iterator[Any]:
    """Yield `numbers`; call `on_draw` if an item after the first one has changed a global random state."""
    for first in numbers:
        yield first
        break
    while True:
        item, has_drawn = _call_and_compare(lambda: next(numbers, _END))
        if item is _END:
            return
        if has_drawn:
            on_draw()
        yield item


def _call_and_compare(draw: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of a call, and whether it has changed a global random state on the host."""
    before = host_random_state()
    item = draw()
    return item, _differ(before, host_random_state())


def refuse_draws(sampler: Any, *, workers: int, role: str) -> None:
    """Warn of a sampler that draws from the global random state after its first item, mixed with draws of training.

    DataError with workers: batches are requested ahead, so that no resume inside an epoch is exact.
    """
    name = type(sampler.sampler if type(sampler) is BatchSampler else sampler).__name__
    what = f"{role} data: the sampler {name} draws from the process's random state while it is iterated"
    want = "a sampler that draws when its iterator is made, or from a generator of its own"
    fix = "self.generator = torch.Generator().manual_seed(...) in the sampler, to draw from; or no checkpoint"
    if workers:
        what = f"{what}: with {workers} worker{'s' if workers > 1 else ''} no resume inside an epoch is exact"
        raise DataError(what, want=want, fix=fix)
    what = f"{what}: a resume inside an epoch is exact only where training itself draws nothing"
    warnings.warn(message(what, want=want, fix=fix), stacklevel=2)


def restarted_if_empty(given: Iterable[Any], numbers: Iterator[Any]) -> Iterator[Any]:
    """Yield `numbers`; if there are none, since the end of a pass was loaded, yield a new pass over `given`."""
    first = next(numbers, _END)
    if first is _END:
        numbers = iter(given)
    else:
        yield first
    yield from numbers


def draws_at_most_at_first(sampler: Any) -> bool:
    """Return whether a sampler is known to make no draws from the global random state after its first item."""
    if type(sampler) is BatchSampler:
        return draws_at_most_at_first(sampler.sampler)
    return type(sampler) in (*_TORCH_SAMPLERS, list, tuple, range)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before["python"] != after["python"] or not torch.equal(before["torch"], after["torch"]):
        return True
    # NumPy's state is the same object until it changes, unless a second normal deviate is cached.
    return before["numpy"] is not after["numpy"] and repr(before["numpy"]) != repr(after["numpy"])


class Twin:
    """Mixin for the class of a twin, which derives from the loader's class and uses its `__iter__`.

    Twin and loader share one `__dict__`, including persistent workers.
    """

    __slots__ = ("make_iterator", "order")
    order: Order
    make_iterator: Callable[[Any], Any] | None
    """Makes the iterator over worker processes; None for torch's iterator."""

    @property
    def _index_sampler(self) -> Order:
        return self.order

    def _get_iterator(self) -> Any:
        loader: Any = super()
        return iterator_of(loader) if self.make_iterator is None else self.make_iterator(self)


def has_twin(loader: DataLoader[Any]) -> bool:
    """Return whether a twin can replace the loader: its class does not override torch's `LOADER_HOOKS`."""
    kind: Any = type(loader)
    known = all(getattr(kind, name) is getattr(DataLoader, name) for name in LOADER_HOOKS)
    return known and not any(vars(base).get("__slots__") for base in kind.__mro__)


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's class overrides `__iter__`, which may then yield anything."""
    return type(loader).__iter__ is not DataLoader.__iter__


def twin(loader: DataLoader[Any], order: Order, make_iterator: Callable[[Any], Any] | None = None) -> Any:
    """Return a twin that is iterated in `order`."""
    return _with_attributes(loader, vars(loader), order, make_iterator=make_iterator)


def view(loader: Any, order: Order, **instead: Any) -> Any:
    """Return a twin with the attributes `instead` replaced, for torch's iterator."""
    return _with_attributes(loader, {**vars(loader), **instead}, order, make_iterator=None)


def _with_attributes(
    loader: Any, attributes: dict[str, Any], order: Order, *, make_iterator: Callable[[Any], Any] | None
) -> Any:
    kind: Any = type(loader)
    new: Any = object.__new__(kind if issubclass(kind, Twin) else _twin_class(kind))
    object.__setattr__(new, "__dict__", attributes)
    object.__setattr__(new, "order", order)
    object.__setattr__(new, "make_iterator", make_iterator)
    return new


@cache
def _twin_class(kind: Any) -> Any:
    return type(kind.__name__, (Twin, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
