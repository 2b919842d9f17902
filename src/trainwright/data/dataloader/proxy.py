"""A twin of a user's `DataLoader`: all its own, but for the order that it is iterated in and who collates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.utils.data import DataLoader

from trainwright.core.torch_private import iterator_of
from trainwright.data.dataloader.order import Order


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
