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
    """The micro-batches of one update, with their rows and, if known on the host, their counts.

    A sequence of batches; each batch is moved to the device when it is read. The gradient of a window is that of

        (sum of the losses' numerators) / (sum of their counts)

    over all micro-batches. Therefore each loss has a weight in `backward`, its `grad_tensor`:

        | the step returns                   | weight        |
        | a mean over `count`                | count / total |
        | a sum with a `count`               | 1 / total     |
        | a plain sum                        | 1             |
        | a mean, of a single micro-batch    | 1             |

    The total is the sum of the counts on the host. If counts are known only after the steps, an estimate replaces the
    total, and the gradients are multiplied by `missing_factor`, estimate / total, after the last `backward`.
    """

    position = -1
    """The index of the last micro-batch that has run; -1 before the first one."""
    begun = False
    """Whether the micro-batches run now or have run."""
    _moved: Any = None
    _estimated_total: Count | None = None
    """The total of the counts, or its estimate, as the divisor of losses; None before the first loss."""
    _total: Count = 0
    """The sum of the counts of all weighted losses so far."""

    def __init__(
        self, batches: list[Any], rows: list[int], counts: list[Count] | None = None, *, move: Move | None = None
    ) -> None:
        self.batches = batches
        self.rows = rows
        self.counts = counts
        self.is_single = len(batches) == 1
        """Whether there is one micro-batch, whose mean needs no weight."""
        self.all_batches, self.all_rows = len(batches), sum(rows)
        """Micro-batches and rows of the window; with several ranks, the most micro-batches of a rank, and all rows."""
        self.mover = move
        """Moves a batch to the device; None if batches are not moved."""

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
        """The fraction of the window's count in each micro-batch, or of its rows without counts.

        In a custom loop, call `backward` on each mean loss times its share.
        """
        counts: list[Count] = list(self.rows) if self.counts is None else self.counts
        total = one_for_zero(as_count(sum(counts)))
        return [as_count(count) / total for count in counts]

    def release(self) -> None:
        """Drop the batch on the device; it is moved again when it is read."""
        self._moved = None

    def restart(self) -> None:
        """Return to the first micro-batch, for another pass over the window (SAM, LBFGS)."""
        self.position = -1
        self._estimated_total, self._total = None, 0

    def weight(self, count: Count | None, *, is_sum: bool) -> Count:
        """Return the weight of the loss of the last micro-batch, without the loss scale.

        `count`: the count of the loss, in the form of `as_count`; None for a plain sum.
        """
        if count is None or (self.is_single and not is_sum):
            return 1.0
        if self._estimated_total is None:
            self._estimated_total = one_for_zero(count if self.is_single else self._estimate_total(count))
        self._total = self._total + count
        return (1.0 if is_sum else count) / self._estimated_total

    def _estimate_total(self, count: Count) -> Count:
        """Return the total of the counts if it is known on the host; else an estimate from the first count.

        The estimate is exact if counts are rows; otherwise it is near the total, so that scaled fp16 gradients stay in
        range.
        """
        total = 0 if self.counts is None else as_count(sum(self.counts))
        if isinstance(total, Tensor) or total:
            return total
        if not isinstance(count, Tensor) and count == self.rows[self.position]:
            return sum(self.rows)
        return one_for_zero(count) * len(self.batches)

    @property
    def missing_factor(self) -> Count:
        """The remaining factor of the gradients: estimated / real total, exactly 1.0 if they are equal.

        1.0 for a total of 0: the gradient is 0, and the loss is NaN.
        """
        estimate, total = self._estimated_total, self._total
        if estimate is None:  # plain sums, or a mean of a single micro-batch
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
    """Yield windows of `accumulate` batches; the last window may be shorter, and no batch is dropped.

    All batches of a window are fetched before it is yielded; the next batch is fetched when the next window is needed.

    Args:
        batches: The batches.
        accumulate: The number of micro-batches per window.
        rows: A function that returns the number of rows of a host batch.
        count: A function that returns the count of the loss of a host batch.
        move: A function that moves a batch to the device; called when the batch is read from the window.
    """
    rows, batches = rows_of if rows is None else rows, iter(batches)
    while group := list(islice(batches, accumulate)):
        counts = None if count is None else list(map(count, group))
        yield Window(group, list(map(rows, group)), counts, move=move)


def rows_of(batch: Any) -> int:
    """Return the rows of a batch: dim 0 of the first tensor, depth first; the length of a list of unequal tensors.

    For lists of equal length, one of which holds dicts or unequal tensors, it is that length: images with their
    targets. DataError if no tensor has rows.
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
    """Return the rows of a nested batch as `rows_of` does; None if no tensor has rows."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # the number of sequences
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
    """Return `accumulate=`, a number or `{first epoch: number}`, as sorted pairs from epoch 0 on."""
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
    """Return the loss of a batch, or 0 for a count of 0, where torch's mean is NaN."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, torch.zeros_like(loss), loss)
    return loss if count else loss.nan_to_num(0.0, 0.0, 0.0)


def weighted_value(loss: Tensor, weight: Count) -> Tensor:
    """Return the value of a loss times its weight; 0 for a weight of 0, even if the loss is NaN."""
    if isinstance(weight, Tensor):
        weight = weight.to(loss.device)
    return zero_if_uncounted(loss.detach(), weight) * weight


def one_for_zero(count: Count) -> Count:
    """Return a count as a divisor, with 1 in place of 0: the sum and its gradient are 0 then."""
    return torch.where(count == 0, torch.ones_like(count), count) if isinstance(count, Tensor) else count or 1


def _ragged(batch: Sequence[Any]) -> bool:
    """Return whether a sequence is rows of unequal length, such as `[(5, 3), (7, 3)]`, and not a tuple of columns."""
    if len(batch) < 2 or not all(isinstance(item, Tensor) for item in batch):
        return False
    alike = len({(item.ndim, item.dtype) for item in batch}) == 1
    return alike and len({item.shape[0] if item.ndim else -1 for item in batch}) > 1


def _rows_in_lists(items: Sequence[Any]) -> int | None:
    """Return the common length of lists with one entry per row; None if the items seem to be columns."""
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
    """Return whether a sequence is dicts with the same keys, such as the targets of a batch of images."""
    return len(rows) > 0 and all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows)


def _items(batch: Any) -> Sequence[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return list(vars(batch).values()) if moves_itself(batch) and hasattr(batch, "__dict__") else []
