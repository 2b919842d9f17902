"""Mistakes with loaders that are read together are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sharded_sources import Sized, table

from trainwright import batches
from trainwright.core.errors import DataError, SettingError
from trainwright.data import together
from trainwright.data.opening import open_source


def two(**how: Any) -> Any:
    return together(a=batches(table(20), 4, shuffle=True, seed=1), b=batches(table(6), 2, shuffle=True, seed=2), **how)


class Once:
    def __iter__(self) -> Iterator[Any]:
        return iter(table(4))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: together(a=Sized(4)), r"fewer than two loaders(.|\n)*have  a(.|\n)*together\(a=first, b=second\)"),
        (together, r"fewer than two loaders(.|\n)*have  none"),
        (lambda: together(**{"a b": Sized(4), "c": Sized(4)}), r"'a b'(.|\n)*names that are identifiers"),
        (lambda: together(**{"class": Sized(4), "c": Sized(4)}), r"'class'(.|\n)*identifiers"),
        (lambda: together(longest=Sized(4), c=Sized(4)), r"'longest'(.|\n)*no length"),
        (lambda: two(length="longset"), r"length='longset'(.|\n)*Did you mean 'longest'(.|\n)*'a', 'b'"),
        (lambda: two(lenght="a"), r"lenght='a'(.|\n)*no loader. Did you mean 'length'"),
        (lambda: two(length=3), r"length=3(.|\n)*'longest', 'shortest', 'a', 'b'"),
        (lambda: together(**dict.fromkeys("ab", Sized(4))), r"a=..., b=...\) are the same loader"),
        (lambda: open_source(together(a=Sized(4), b=iter(table(4)))), r"b=...\) can be iterated only once"),
        (lambda: open_source(together(a=Sized(4), b=Once())), r"b has no length(.|\n)*length='a'"),
        (lambda: open_source(together(a=Sized(4), b=Sized(4)), batch_size=3), r"batch_size=3 with a Sized"),
        (lambda: open_source(together(a=table(9), b=Sized(4))), r"a data set of rows, without a batch size"),
    ],
)
def test_mistakes_are_refused_by_name(call: Callable[[], Any], named: str) -> None:
    with pytest.raises((SettingError, DataError), match=named):
        call()
