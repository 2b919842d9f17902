"""Group micro-batches into windows and weigh them: one window is one optimizer update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainwright.core.device import widest_float
from trainwright.core.errors import DataError, SettingError, message
from trainwright.core.records import Count
from trainwright.core.suggestions import suggests

Accumulate = int | Mapping[int, int]


class Window(Sequence[Any]):
    """The micro-batches of one update, with their rows and, where the host knows them, their counts.

    A sequence of batches; each is moved to the device when it is read. The gradient of a window is that of

        (sum of the losses' numerators) / (sum of their counts)

    over all its micro-batches. Where every count is known beforehand each loss is divided by the whole at once.
    Where a step tells its count only when it has run, a guess stands in for the whole, and `owed` is the factor
    by which the gradients are to be multiplied afterwards.
    """

    position = -1
    """The micro-batch that has run last; -1 before the first."""
    is_weighed = False
    """Whether the loss of the micro-batch in hand was weighed where it was made: by one of several processes."""
    begun = False
    """Whether its micro-batches are being run, or have been."""
    _moved: Any = None
    _base: Count | None = None
    _total: Count = 0
    _guessed = False

    def __init__(
        self,
        batches: list[Any],
        rows: list[int],
        counts: list[Count] | None = None,
        *,
        move: Callable[[Any], Any] | None = None,
    ) -> None:
        self.batches = batches
        self.rows = rows
        self.counts = counts
        self.alone = len(batches) == 1
        self.mover = move
        """What moves a batch to the device; None where none is moved."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch = self.batches[index]
        if self.mover is None:
            return batch
        if not self.alone:
            return self.mover(batch)
        if self._moved is None:
            self._moved = self.mover(batch)
        return self._moved

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches) if self.mover is None else map(self.__getitem__, range(len(self.batches)))

    @property
    def shares(self) -> list[Any]:
        """The share of each micro-batch: its count over the window's, its rows over the window's without counts.

        A mean loss times its share is what `backward` is called on in a loop of your own.
        """
        counts: list[Count] = list(self.rows) if self.counts is None else self.counts
        whole = above_nothing(_add(counts))
        return [ratio(count, whole if isinstance(whole, Tensor) else whole or 1) for count in counts]

    @property
    def all_rows(self) -> int:
        """The rows of the window, over all processes."""
        return sum(self.rows)

    @property
    def all_batches(self) -> int:
        """The micro-batches of the window; of several processes those of the one that has most."""
        return len(self.batches)

    def let_go(self) -> None:
        """Give up the batch that was moved and kept; it is moved again when it is read."""
        self._moved = None

    def begin(self) -> None:
        """Start weighing anew: a window may be run several times (SAM, LBFGS)."""
        self.position = -1
        self._base, self._total, self._guessed = None, 0, False

    def weighed(self, loss: Tensor, count: Count | None, *, summed: bool, own: bool) -> Tensor:
        """The loss of the micro-batch in hand, weighed by its share of the window.

        `count` is what it is a mean over, or a sum; None for a sum that nothing is to be divided by.
        """
        if count is None:
            return loss
        count = _where_lies(loss, count)
        if self.alone:
            return loss / above_nothing(count) if summed else loss
        divisor = _where_lies(loss, self.divisor(count, own=own))
        if summed:
            return loss / divisor
        weighed: Tensor = without_nothing(loss, count) * ratio(count, divisor)
        return weighed

    def divisor(self, count: Count, *, own: bool) -> Count:
        """Return what the numerator of the micro-batch in hand is divided by before `backward`.

        `own`: the step gave the count itself, or it was found in the loss, so that the others' are not known yet.
        """
        if self._base is None:
            whole = 0 if own else _add(self.counts or [0])
            self._guessed = not isinstance(whole, Tensor) and not whole  # nothing is known, or nothing is counted
            self._base = self._guess(count) if self._guessed else above_nothing(whole)
        elif own:  # the first of the window had the count that the host knew, by chance
            self._guessed = True
        self._total = self._total + count
        return self._base

    @property
    def owed(self) -> Count:
        """The factor by which the gradients are still to be multiplied: exactly 1.0 where the divisor was right.

        A window that counts nothing owes nothing: its gradient is 0, and its loss says NaN.
        """
        if not self._guessed:
            return 1.0
        assert self._base is not None
        if isinstance(self._base, Tensor) or isinstance(self._total, Tensor):
            factor = ratio(self._base, torch.as_tensor(self._total))
            return torch.where(torch.as_tensor(self._total) == 0, torch.ones_like(factor), factor)
        return 1.0 if self._base == self._total or not self._total else self._base / self._total

    def _guess(self, count: Count) -> Count:
        """A divisor near the whole, so that scaled fp16 gradients stay in range; exact where rows are counted."""
        if isinstance(count, Tensor):
            return count.clamp(min=1) * len(self.batches)
        if count == self.rows[self.position]:
            return sum(self.rows)
        return max(count, 1) * len(self.batches)


@suggests
def windows(
    batches: Iterable[Any],
    accumulate: int = 1,
    *,
    rows: Callable[[Any], int] | None = None,
    count: Callable[[Any], Count] | None = None,
    always_count: bool = False,
    move: Callable[[Any], Any] | None = None,
) -> Iterator[Window]:
    """Group batches into windows of `accumulate`; the last one of a pass is short, and no batch is lost.

    A window is fetched whole, and the first batch of the next only when it is asked for. `count` is called on each
    host batch of a window of several (of every window with `always_count`).
    """
    rows, batches = rows_of if rows is None else rows, iter(batches)
    if accumulate == 1:
        counts = None
        for batch in batches:
            if always_count and count is not None:
                counts = [count(batch)]
            yield Window([batch], [rows(batch)], counts, move=move)
        return
    while group := list(islice(batches, accumulate)):
        counts = [count(batch) for batch in group] if count is not None else None
        yield Window(group, [rows(batch) for batch in group], counts, move=move)


def ratio(part: Count, whole: Count) -> Any:
    """Return part / whole; with tensors in the widest type, for torch divides whole numbers in float32."""
    if isinstance(part, Tensor):
        return part.to(widest_float(part.device)) / whole
    if isinstance(whole, Tensor):
        return part / whole.to(widest_float(whole.device))
    return part / whole


def rows_of(batch: Any) -> int:
    """The rows of a batch: dim 0 of the first tensor found depth-first; the length of a list of unequal tensors.

    Of lists of one length, one of which holds dicts or unequal tensors, it is that length: pictures and their targets.
    """
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        rows: int = batch[0].shape[0]
        for item in batch:
            if not isinstance(item, Tensor) or not item.ndim or item.shape[0] != rows:
                break
        else:
            return rows
    found = find_rows(batch)
    if found is None:
        raise DataError(
            message(
                f"the rows of a batch of type {type(batch).__name__} cannot be counted",
                have="no tensor with a dimension in it",
                want="a batch with a tensor whose dim 0 is rows",
                fix="override count(self, batch) in your Trainer",
            )
        )
    return found


def find_rows(batch: Any) -> int | None:
    """Return the rows of a nested batch as `rows_of` does, or None where nothing tells them."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # every sequence has a first entry
    if isinstance(batch, list | tuple) and _ragged(batch):
        return len(batch)
    items = _items(batch)
    found = _rows_in_lists(items)
    if found is not None:
        return found
    for item in items:
        found = find_rows(item)
        if found is not None:
            return found
    return None


def accumulation(setting: Accumulate) -> tuple[tuple[int, int], ...]:
    """Check `accumulate=`: a number, or `{first epoch: number}`; returned sorted, from epoch 0 on."""
    table = dict(setting) if isinstance(setting, Mapping) else {0: setting}
    for epoch, k in table.items():
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (epoch, k))
        if not whole or epoch < 0 or k < 1:
            raise SettingError(
                message(
                    f"accumulate={setting!r}",
                    want="micro-batches per update, at least 1, or {first epoch: micro-batches}",
                    fix="accumulate=4, or accumulate={0: 1, 5: 4}",
                )
            )
    if 0 not in table:
        raise SettingError(message(f"accumulate={setting!r} says nothing of epoch 0", fix="accumulate={0: 1, 5: 4}"))
    return tuple(sorted(table.items()))


def without_nothing(loss: Tensor, count: Count) -> Tensor:
    """The loss of a batch, 0 where it counts nothing: torch's mean over nothing is NaN."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, torch.zeros_like(loss), loss)
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)


def above_nothing(count: Count) -> Count:
    """A divisor for a window that counts nothing, as far as only the device knows."""
    return torch.where(count == 0, torch.ones_like(count), count) if isinstance(count, Tensor) else count


def _where_lies(loss: Tensor, count: Count) -> Count:
    """The count on the device of the loss: of a model over several devices they may lie on two."""
    if isinstance(count, Tensor) and count.device != loss.device:
        return count.to(loss.device, non_blocking=count.is_cpu)
    return count


def _add(counts: list[Count]) -> Count:
    total = counts[0]
    for count in counts[1:]:
        total = total + count
    return total


def _ragged(batch: Sequence[Any]) -> bool:
    """Whether a sequence is rows of unequal length, like `[(5, 3), (7, 3)]`, and no tuple of columns."""
    if len(batch) < 2 or not all(isinstance(item, Tensor) for item in batch):
        return False
    alike = len({(item.ndim, item.dtype) for item in batch}) == 1
    return alike and len({item.shape[0] if item.ndim else -1 for item in batch}) > 1


def _rows_in_lists(items: Sequence[Any]) -> int | None:
    """The common length of lists with one entry per row; None where the items are columns, as far as can be told."""
    if not items or not isinstance(items[0], list | tuple) or isinstance(items[0], PackedSequence):
        return None
    rows = len(items[0])
    for item in items:
        length = item.shape[0] if isinstance(item, Tensor) and item.ndim else None
        if (len(item) if isinstance(item, list | tuple) else length) != rows:
            return None
    told = any(isinstance(item, list | tuple) and (_ragged(item) or _of_one_form(item)) for item in items)
    return rows if told else None


def _of_one_form(rows: Sequence[Any]) -> bool:
    """Whether a sequence is dicts of the same keys, as the targets of a batch of pictures are."""
    return len(rows) > 0 and all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows)


def _items(batch: Any) -> Sequence[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return list(vars(batch).values()) if hasattr(batch, "to") and hasattr(batch, "__dict__") else []
