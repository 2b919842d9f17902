"""`together(...)`: several loaders read side by side, whose batches come as one dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from keyword import iskeyword
from typing import Any, cast

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import did_you_mean
from trainwright.data.row_batches import Batches
from trainwright.data.source import Source
from trainwright.data.sources import open_source, takes_batch_size
from trainwright.data.transforms.side_by_side import LENGTHS, SideBySide


def together(*, length: str = "longest", **loaders: Any) -> Together:
    """Several loaders side by side: each batch is a dict of one batch of each, by their names.

    `loaders` are whatever `train` may be, by keywords. One of them gives the epoch, anew each time: the "longest", the
    "shortest", or the one that `length` names. The others go on from epoch to epoch where they stopped, and begin
    their next pass when they end, so that each of their rows has its turn. A batch counts as many rows as that of the
    first loader; a step whose loss is a mean over something else returns `MeanLoss` or `SumLoss` with its own count.
    SettingError for fewer than two loaders, for names that cannot be keywords, and for one loader under two names.
    """
    return Together(loaders, length)


class Together:
    """Loaders to be read side by side; made by `together`."""

    def __init__(self, loaders: Mapping[str, Any], length: str) -> None:
        self.loaders = {name: copy(one) if isinstance(one, Batches) else one for name, one in loaders.items()}
        """What was made by `batches` is read here by itself: it may be read elsewhere too."""
        self.length = length
        self._by_hand: Source | None = None
        self._passes = 0
        _check_names(loaders)
        for name, one in loaders.items():
            if isinstance(one, str):
                meant = did_you_mean(name, ("length",))
                raise SettingError(f"together({name}={one!r}): a string is no loader.{meant}", where=True)
        if length not in (*LENGTHS, *loaders):
            names = ", ".join(map(repr, (*LENGTHS, *loaders)))
            meant = did_you_mean(length, (*LENGTHS, *loaders)) if isinstance(length, str) else ""
            raise SettingError(f"together(length={length!r}).{meant}", want=f"one of {names}")

    def __repr__(self) -> str:
        return f"together({', '.join(self.loaders)}, length={self.length!r})"

    def __len__(self) -> int:
        length = self._opened().length
        if length is None:
            raise TypeError(f"{self!r} has no length")
        return length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._passes += 1
        return self._opened().epoch(self._passes - 1)

    def source(self, *, batch_size: int | None, shuffle: bool, role: str) -> Source:
        """The batches as a run reads them; `batch_size` is for those loaders that are rows."""
        nobody = not any(map(takes_batch_size, self.loaders.values()))  # then the first refuses it
        sources = {
            name: open_source(
                data, batch_size=batch_size if nobody or takes_batch_size(data) else None, shuffle=shuffle, role=role
            )
            for name, data in self.loaders.items()
        }
        return cast(Source, SideBySide(sources, length=self.length, role=role))

    def _opened(self) -> Source:
        if self._by_hand is None:
            apart = Together(self.loaders, self.length)  # a run may read these
            self._by_hand = apart.source(batch_size=None, shuffle=False, role="train")
        return self._by_hand


def _check_names(loaders: Mapping[str, Any]) -> None:
    for name in loaders:
        if not name.isidentifier() or iskeyword(name) or name in LENGTHS:
            fix = "together(clean=..., noisy=...)"
            raise SettingError(
                f"together(**{{{name!r}: ...}})", want="names that are identifiers, and no length", fix=fix
            )
    if len(loaders) < 2:
        what = "together() of fewer than two loaders"
        raise SettingError(what, have=", ".join(loaders) or "none", fix="together(a=first, b=second)")
    names = {id(data): name for name, data in reversed(list(loaders.items()))}
    for name, data in loaders.items():
        if names[id(data)] != name:
            what = f"together({names[id(data)]}=..., {name}=...) are one loader, which stands in one place"
            raise SettingError(what, want="a loader of its own for each name")
