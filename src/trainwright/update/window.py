"""Group micro-batches into windows and weight their losses: one window is one optimizer update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainwright.core.device import moves_itself
from trainwright.core.errors import DataError, SettingError
from trainwright.core.host_reads import as_count
from trainwright.core.records import Count
from trainwright.core.suggestions import suggests

Accumulate = int | Mapping[int, int]
Move = Callable[[Any], Any]
"""Moves a batch to the device."""


class Window(Sequence[Any]):
    """The micro-batches of one update, with their rows and, where the host knows them, their counts.

    A sequence of batches; each is moved to the device when it is read. The gradient of a window is that of

        (sum of the losses' numerators) / (sum of their counts)

    over all its micro-batches. So `backward` gets each loss with a weight, as its `grad_tensor`:

        | the step returns                   | weight        |
        | a mean over `count`                | count / total |
        | a sum with a `count`               | 1 / total     |
        | a plain sum                        | 1             |
        | a mean, of a single micro-batch    | 1             |

    The total is the sum of the host's counts. Where a step finds its count itself, an estimate takes the place of the
    total, and `missing_factor`, estimate / total, is multiplied into the gradients after the last `backward`.
    """

    position = -1
    """The micro-batch that has run last; -1 before the first."""
    begun = False
    """Whether its micro-batches are being run, or have been."""
    _moved: Any = None
    _estimated_total: Count | None = None
    """The total of the counts, or an estimate of it, by which losses are divided; None before the first one."""
    _total: Count = 0
    """The sum of the counts of the losses that were weighted."""

    def __init__(
        self, batches: list[Any], rows: list[int], counts: list[Count] | None = None, *, move: Move | None = None
    ) -> None:
        self.batches = batches
        self.rows = rows
        self.counts = counts
        self.is_single = len(batches) == 1
        """Whether there is one micro-batch, whose mean needs no weight."""
        self.all_batches, self.all_rows = len(batches), sum(rows)
        """Micro-batches and rows of the window; with several ranks those of the rank with most, and of all of them."""
        self.mover = move
        """Moves a batch to the device; None if none is moved."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch = self.batches[index]
        if self.mover is None:
            return batch
        if not self.is_single:
            return self.mover(batch)
        if self._moved is None:
            self._moved = self.mover(batch)
        return self._moved

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches) if self.mover is None else map(self.__getitem__, range(len(self.batches)))

    @property
    def shares(self) -> list[Any]:
        """The share of each micro-batch: its count over the window's, or its rows over the window's without counts.

        In a hand-written loop `backward` is called on each mean loss times its share.
        """
        counts: list[Count] = list(self.rows) if self.counts is None else self.counts
        total = one_for_zero(as_count(sum(counts)))
        return [as_count(count) / total for count in counts]

    def release(self) -> None:
        """Drop the batch on the device; it is moved again when it is read."""
        self._moved = None

    def restart(self) -> None:
        """Return to the first micro-batch for a further pass: a window may be run several times (SAM, LBFGS)."""
        self.position = -1
        self._estimated_total, self._total = None, 0

    def weight(self, count: Count | None, *, is_sum: bool) -> Count:
        """Return the weight of the loss of the micro-batch that has just run, without the loss scale.

        `count`: the count of the loss, as `as_count` returns it; None for a plain sum, which nothing divides.
        """
        if count is None or (self.is_single and not is_sum):
            return 1.0
        if self._estimated_total is None:
            self._estimated_total = one_for_zero(count if self.is_single else self._estimate_total(count))
        self._total = self._total + count
        return (1.0 if is_sum else count) / self._estimated_total

    def _estimate_total(self, count: Count) -> Count:
        """Return the total of the counts where the host knows it; else an estimate, from the count of the first loss.

        The estimate is near the total, so that scaled fp16 gradients stay in range, and exact for counts of rows.
        """
        total = 0 if self.counts is None else as_count(sum(self.counts))
        if isinstance(total, Tensor) or total:
            return total
        if not isinstance(count, Tensor) and count == self.rows[self.position]:
            return sum(self.rows)
        return one_for_zero(count) * len(self.batches)

    @property
    def missing_factor(self) -> Count:
        """The factor that the gradients still lack: estimated / real total, exactly 1.0 where they are equal.

        1.0 for a window that counts nothing: its gradient is 0, and its loss is NaN.
        """
        estimate, total = self._estimated_total, self._total
        if estimate is None:  # plain sums, or the mean of a single micro-batch
            return 1.0
        if isinstance(total, Tensor):
            return torch.where(total == 0, 1.0, estimate / total)
        return estimate / total if total else 1.0


@suggests
def windows(
    batches: Iterable[Any],
    accumulate: int = 1,
    *,
    rows: Callable[[Any], int] | None = None,
    count: Callable[[Any], Count] | None = None,
    move: Move | None = None,
) -> Iterator[Window]:
    """Group batches into windows of `accumulate`; the last one of a pass is short, and no batch is lost.

    All batches of a window are fetched before it is returned, and the first batch of the next when that is asked for.

    Args:
        batches: The batches.
        accumulate: Micro-batches per window.
        rows: A function that returns the rows of a host batch.
        count: A function that returns the count of the loss of a host batch.
        move: A function that moves a batch to the device, when it is read from the window.
    """
    rows, batches = rows_of if rows is None else rows, iter(batches)
    while group := list(islice(batches, accumulate)):
        counts = None if count is None else list(map(count, group))
        yield Window(group, list(map(rows, group)), counts, move=move)


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
    found = 1 if batch is None else find_rows(batch)  # None: a step that makes its own data, fit(None)
    if found is None:
        raise DataError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted",
            have="no tensor with a dimension in it",
            want="a batch with a tensor whose dim 0 is rows",
            fix="override count(self, batch) in your Trainer",
        )
    return found


def find_rows(batch: Any) -> int | None:
    """Return the rows of a nested batch as `rows_of` does, or None where no tensor has rows."""
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
        are_integers = all(isinstance(n, int) and not isinstance(n, bool) for n in (epoch, k))
        if not are_integers or epoch < 0 or k < 1:
            raise SettingError(
                f"accumulate={setting!r}",
                want="micro-batches per update, at least 1, or {first epoch: micro-batches}",
                fix="accumulate=4, or accumulate={0: 1, 5: 4}",
            )
    if 0 not in table:
        raise SettingError(f"accumulate={setting!r} says nothing of epoch 0", fix="accumulate={0: 1, 5: 4}")
    return tuple(sorted(table.items()))


def zero_if_uncounted(loss: Tensor, count: Count) -> Tensor:
    """Return the loss of a batch, or 0 where it counts nothing: torch's mean over nothing is NaN."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, torch.zeros_like(loss), loss)
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)


def weighted_value(loss: Tensor, weight: Count) -> Tensor:
    """Return the value of a loss times its weight; 0 for a weight of 0, even if the loss is NaN."""
    if isinstance(weight, Tensor):
        weight = weight.to(loss.device)
    return zero_if_uncounted(loss.detach(), weight) * weight


def one_for_zero(count: Count) -> Count:
    """Return a count to divide by: 1 in the place of 0, since a sum over nothing is 0, and so is its gradient."""
    return torch.where(count == 0, torch.ones_like(count), count) if isinstance(count, Tensor) else count or 1


def _ragged(batch: Sequence[Any]) -> bool:
    """Whether a sequence is rows of unequal length, like `[(5, 3), (7, 3)]`, and no tuple of columns."""
    if len(batch) < 2 or not all(isinstance(item, Tensor) for item in batch):
        return False
    alike = len({(item.ndim, item.dtype) for item in batch}) == 1
    return alike and len({item.shape[0] if item.ndim else -1 for item in batch}) > 1


def _rows_in_lists(items: Sequence[Any]) -> int | None:
    """Return the common length of lists with one entry per row; None where the items seem to be columns."""
    if not items or not isinstance(items[0], list | tuple) or isinstance(items[0], PackedSequence):
        return None
    rows = len(items[0])
    for item in items:
        length = item.shape[0] if isinstance(item, Tensor) and item.ndim else None
        if (len(item) if isinstance(item, list | tuple) else length) != rows:
            return None
    are_rows = any(isinstance(item, list | tuple) and (_ragged(item) or _of_one_form(item)) for item in items)
    return rows if are_rows else None


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
    return list(vars(batch).values()) if moves_itself(batch) and hasattr(batch, "__dict__") else []
