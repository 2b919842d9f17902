"""The order of a loader's batches, and a twin of the loader that is iterated in it."""

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
from trainwright.core.torch_private import iterator_of
from trainwright.data.source import skipped

if TYPE_CHECKING:
    from trainwright.data.slicing import Dealt

_TORCHS_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_END = object()


class Order:
    """A sampler or batch sampler, iterated once for each time that it would be without this.

    `skip` batches are left out at the start of every pass that begins, when the first is pulled or at `pass_over`.
    `moved` is called where a pull after the first has moved a random state of the process.
    """

    def __init__(self, given: Iterable[Any], *, name: str) -> None:
        self._given = given
        self._name = name
        self._left: _Left | None = None
        self.deals: Callable[[Iterator[Any]], Dealt] | None = None
        """Cuts the row numbers of a pass that begins for this process; None where it is the only one."""
        self.dealt: Dealt | None = None
        """The pass that was begun last, where it was cut."""
        self.skip = 0
        self.closed = False
        """Whether passes are empty: persistent workers are started by one that asks for nothing."""
        self.once_more = False
        """Whether a sampler that was loaded at the end of its pass is to be asked for the next one."""
        self.moved: Callable[[], None] | None = None

    def __len__(self) -> int:
        given: Any = self._given
        return len(given)

    def __iter__(self) -> Iterator[Any]:
        if self.closed:
            return iter(())
        numbers = iter(self._given)
        if self.once_more:
            numbers = asked_again(self._given, numbers)
        if self.moved is not None:
            numbers = watched(numbers, self.moved)
        if self.skip:
            numbers = self._left = _Left(numbers, self.skip, self._name)
        if self.deals is not None:
            numbers = self.dealt = self.deals(numbers)
        return numbers

    def pass_over(self) -> None:
        """Pull what is left out now, with the random state that there is, and what all processes draw alike."""
        if self.deals is not None and self.dealt is not None:
            self.dealt.draw()
        elif self._left is not None:
            self._left.pass_over()


class _Left:
    """What is left of a pass: its first `skip` are pulled and dropped, not before they are asked for."""

    def __init__(self, numbers: Iterator[Any], skip: int, name: str) -> None:
        self._numbers = numbers
        self._skip = skip
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._skip:
            self.pass_over()
        return next(self._numbers)

    def pass_over(self) -> None:
        skip, self._skip = self._skip, 0
        skipped(self._numbers, skip, self._name)


def watched(numbers: Iterator[Any], moved: Callable[[], None]) -> Iterator[Any]:
    """`numbers`; `moved` is called where a pull after the first has moved a random state of the process."""
    for first in numbers:
        yield first
        break
    while True:
        pulled, has_moved = moves_random_state(lambda: next(numbers, _END))
        if pulled is _END:
            return
        if has_moved:
            moved()
        yield pulled


def moves_random_state(pull: Callable[[], Any]) -> tuple[Any, bool]:
    """What a call gives, and whether it has moved a random state of the process on the host."""
    before = host_random_state()
    pulled = pull()
    return pulled, _differ(before, host_random_state())


def refuse_draws(sampler: Any, *, workers: int, role: str) -> None:
    """Meet a sampler that draws from the process's random state after its first pull, where training draws too.

    DataError where workers are asked ahead, so that no resume inside an epoch is exact; else a warning.
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


def asked_again(given: Iterable[Any], numbers: Iterator[Any]) -> Iterator[Any]:
    """`numbers`; a new pass over `given` where there are none, as after a state of a pass's end was loaded."""
    first = next(numbers, _END)
    if first is _END:
        numbers = iter(given)
    else:
        yield first
    yield from numbers


def draws_at_most_at_first(sampler: Any) -> bool:
    """Whether a sampler is known to leave the process's random state alone after its first pull."""
    if type(sampler) is BatchSampler:
        return draws_at_most_at_first(sampler.sampler)
    return type(sampler) in (*_TORCHS_OWN, list, tuple, range)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before["python"] != after["python"] or not torch.equal(before["torch"], after["torch"]):
        return True
    # NumPy's state is the same object until it moves, unless it holds a second normal deviate.
    return before["numpy"] is not after["numpy"] and repr(before["numpy"]) != repr(after["numpy"])


class Twin:
    """What a twin has besides the loader's class, whose `__iter__` runs on it as on the loader.

    Twin and loader share their attributes: what one sets the other has, persistent workers too.
    """

    __slots__ = ("made", "order")
    order: Order
    made: Callable[[Any], Any] | None
    """Makes torch's iterator over worker processes; None for torch's own."""

    @property
    def _index_sampler(self) -> Order:
        return self.order

    def _get_iterator(self) -> Any:
        loader: Any = super()
        return iterator_of(loader) if self.made is None else self.made(self)


def has_twin(loader: DataLoader[Any]) -> bool:
    """Whether a twin can stand in: the loader's class leaves to torch how iterators are made."""
    kind: Any = type(loader)
    known = all(getattr(kind, name) is getattr(DataLoader, name) for name in ("_get_iterator", "_index_sampler"))
    return known and not any(vars(base).get("__slots__") for base in kind.__mro__)


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class has an `__iter__` of its own, which may give what it likes."""
    return type(loader).__iter__ is not DataLoader.__iter__


def twin(loader: DataLoader[Any], order: Order, made: Callable[[Any], Any] | None = None) -> Any:
    """A twin that is iterated in `order`."""
    return _with_attributes(loader, vars(loader), order, made=made)


def view(loader: Any, order: Order, **instead: Any) -> Any:
    """A twin for torch's iterator to be made of, with attributes of its own `instead`."""
    return _with_attributes(loader, {**vars(loader), **instead}, order, made=None)


def _with_attributes(
    loader: Any, attributes: dict[str, Any], order: Order, *, made: Callable[[Any], Any] | None
) -> Any:
    kind: Any = type(loader)
    made_of: Any = object.__new__(kind if issubclass(kind, Twin) else _twin_class(kind))
    object.__setattr__(made_of, "__dict__", attributes)
    object.__setattr__(made_of, "order", order)
    object.__setattr__(made_of, "made", made)
    return made_of


@cache
def _twin_class(kind: Any) -> Any:
    return type(kind.__name__, (Twin, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
