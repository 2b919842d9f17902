"""`batches(..., augment=...)`: batches whose images are changed where they lie, each by draws of its own number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.data.arrays import Table
from trainwright.data.row_batches import Batches, BatchSettings
from trainwright.data.seeded import SeededRows, mixed
from trainwright.data.transforms.augment import Augmentation, Draws, images_of
from trainwright.distributed.mesh import Slice

Given = MutableMapping[Tensor, "_Place"]
"""The draws of batches that are held, by their images."""


class AugmentedBatches(Batches):
    """A data set, dealt into batches, whose images are changed.

    Who iterates gets them changed. A run has them as they are, moves them, and has `finish` change them on its device.
    """

    _given: Given | None = None
    """The batches that a run will have changed itself, of the pass that begins next; None: they are given changed."""
    _trains = True
    """Whether what is random is done."""

    def __init__(
        self, rows: Table | SeededRows, settings: BatchSettings, sampler: Iterable[int] | None, *, augment: Any
    ) -> None:
        super().__init__(rows, settings, sampler)
        self._augmentation = Augmentation(augment)

    def __iter__(self) -> Iterator[Any]:
        self._draw_seed()
        by_hand = copy(self)
        by_hand._given = None
        batches = Batches.__iter__(by_hand)
        self._passes = by_hand._passes
        return batches

    def describe(self) -> str:
        """Rows, batch size, order, changes."""
        return f"{super().describe()}, images by {self._augmentation.describe()}"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The batches of `epoch` without its first `skip`, which are not read."""
        given, self._given = self._given, None
        base = mixed(self._draw_seed(), epoch, 2)
        return self._numbered(super().epoch(epoch, skip), base, skip, given=given)

    def finishing(self, move: Callable[[Any], Any] | None, *, trains: bool) -> Callable[[Any], Any]:
        """What moves the batches of the pass that begins next, and changes them where they lie then.

        `trains`: whether what is random is done.
        """
        self._given = given = WeakIdKeyDictionary()
        return _Finishing(self, move, given, trains=trains)

    def beside(self) -> Batches:
        """Return a copy for a pass beside training, without random changes."""
        other: Any = super().beside()
        other._trains = False
        return cast(Batches, other)

    def _numbered(self, batches: Iterator[Any], base: int, first: int, *, given: Given | None) -> Iterator[Any]:
        for number, one in enumerate(batches, first):
            batch = one.batch if self._part is not None else one
            place = self._place(one, mixed(base, number))
            if given is not None:
                given[images_of(batch)] = place
                yield one
                continue
            changed = self.changed(batch, place, trains=self._trains)
            yield one._replace(batch=changed) if self._part is not None else changed

    def _place(self, given: Any, seed: int) -> _Place:
        part = self._part
        if part is not None and isinstance(given, Slice) and given.all_rows is not None:
            return _Place(seed, given.all_rows, part.run(given.all_rows))
        batch = given.batch if isinstance(given, Slice) else given
        rows = len(images_of(batch))
        # Rows of this process's own: those of the first draw what they would draw on one process.
        return _Place(mixed(seed, part.rank) if part is not None and part.rank else seed, rows, range(rows))

    def changed(self, batch: Any, place: _Place, *, trains: bool) -> Any:
        """A batch with its images changed by the draws of its place; `trains`: whether what is random is done."""
        draws = Draws(place.seed, whole=place.whole, rows=place.rows, device=images_of(batch).device)
        return self._augmentation(batch, draws, trains=trains)

    def _draw_seed(self) -> int:
        if self._seed is None and self._augmentation.draws:
            self._seed = int(torch.empty((), dtype=torch.int64).random_())
        return super()._draw_seed()


class _Finishing:
    """Moves batches, and changes them where they lie then."""

    def __init__(
        self, batches: AugmentedBatches, move: Callable[[Any], Any] | None, given: Given, *, trains: bool
    ) -> None:
        self._batches, self._move, self._given, self._trains = batches, move, given, trains

    def __call__(self, batch: Any) -> Any:
        """The batch as it is trained on."""
        moved, place = batch if self._move is None else self._move(batch), self._given[images_of(batch)]
        return self._batches.changed(moved, place, trains=self._trains)

    def share(self, batch: Any, part: Any, rows: range) -> None:
        """Have a part of a batch draw what these rows of it would draw."""
        place = self._given[images_of(batch)]
        self._given[images_of(part)] = place._replace(rows=place.rows[rows.start : rows.stop])


class _Place(NamedTuple):
    """Which draws a batch has."""

    seed: int
    whole: int
    """Rows over all processes."""
    rows: range
    """Positions of those that this process runs."""
