"""How rows are split into those to train on and those held out, by scikit-learn's splitters; and leaks refused."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.trees import sequence_like
from trainwright.data.seeded import mixed_seed, rows_of
from trainwright.update.batches import split

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """The rows of every fold, and what further splits of its training rows must heed."""

    rows: int
    pairs: tuple[tuple[Rows, Rows], ...]
    """(rows to train on, rows held out) of each fold."""
    target: NDArray[Any] | None
    """The classes of all rows, where the folds were stratified."""
    groups: NDArray[Any] | None

    @property
    def in_order(self) -> bool:
        """Whether every fold is trained on rows that all come before those it holds out, as in a time series."""
        return all(train.max() < held_out.min() for train, held_out in self.pairs)

    def put_aside(self, train: Rows, share: float, *, seed: int) -> tuple[Rows, Rows]:
        """Split training rows once more: those to fit, and a share to validate on.

        Of a time series the last ones; whole groups where there are groups; else drawn, by class where the folds are.
        """
        if self.in_order:
            cut = len(train) - max(1, round(share * len(train)))
            return train[:cut], train[cut:]
        from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit, StratifiedShuffleSplit

        of_groups = None if self.groups is None else self.groups[train]
        classes = None if self.target is None else self.target[train]
        kind = ShuffleSplit if classes is None else StratifiedShuffleSplit
        splitter = (kind if of_groups is None else GroupShuffleSplit)(1, test_size=share, random_state=seed)
        fitted, validated = next(iter(splitter.split(np.zeros(len(train)), classes, of_groups)))
        return train[np.sort(fitted)], train[np.sort(validated)]


def split_rows(folds: Any, data: Any, *, target: Any, groups: Any, seed: int) -> Splits:
    """Return the rows of every fold, checked: no row, and no group, is on both sides of one.

    `folds` is a number, a splitter of scikit-learn, or pairs of row numbers (to train on, held out).
    """
    rows = _length(data)
    groups = None if groups is None else _column(groups, "groups", rows)
    named = type(folds).__name__
    stratifies = "Stratified" in named
    classes = None if target is None else _column(target, "target", rows)
    if classes is None and (stratifies or isinstance(folds, int)):
        classes = _target_of(data, reads=stratifies)
    if isinstance(folds, int):
        folds = _splitter(folds, rows, classes, groups=groups, seed=seed)
        stratifies = "Stratified" in type(folds).__name__
    if stratifies and classes is None:
        what = f"{type(folds).__name__}, and the data have no target that is known"
        raise SettingError(what, want="the class of each row", fix="cross_validate(..., target=classes)")
    if hasattr(folds, "split") and not isinstance(folds, str | bytes):
        with rng_preserved():  # a splitter without a random_state draws from NumPy's global state
            start_random_state(mixed_seed(seed, 0))
            heard = groups if "Group" in type(folds).__name__ or not _is_sklearns(folds) else None
            pairs = list(folds.split(np.zeros(rows), classes, heard))
    else:
        pairs = _given(folds)
    checked = tuple(_checked(pair, index, rows=rows, groups=groups) for index, pair in enumerate(pairs))
    if not checked:
        raise SettingError("folds without one split", want="at least one pair of row numbers")
    return Splits(rows, checked, classes if stratifies else None, groups)


def seed_of(held_out: Rows, seed: int) -> int:
    """The seed of the fold that holds these rows out: neither the order nor the number of folds matters to it."""
    return mixed_seed(seed, zlib.crc32(np.sort(held_out).tobytes()))


def take(data: Any, rows: Rows) -> Any:
    """Those rows of the data, in the same kind of container."""
    if isinstance(data, Tensor):
        return data[torch.from_numpy(rows).to(data.device)]
    if isinstance(data, np.ndarray):
        return data[rows]
    if isinstance(data, dict):
        return {key: take(column, rows) for key, column in data.items()}
    if isinstance(data, tuple):
        return sequence_like(data, [take(column, rows) for column in data])
    return Subset(data, rows.tolist())


def _length(data: Any) -> int:
    """The rows of the data; DataError for anything that has none by number."""
    rows_of(data, None)
    if isinstance(data, tuple | dict):
        columns = list(data.values() if isinstance(data, dict) else data)
        return len(columns[0])
    return len(data)


def _target_of(data: Any, *, reads: bool) -> NDArray[Any] | None:
    """The target that `split` finds in the rows of the data; of a data set it is read row by row, where it must."""
    if isinstance(data, tuple | dict | Tensor | np.ndarray):
        target = None if isinstance(data, np.ndarray) else split(data)[1]
        return None if target is None else _array(target)
    if type(data) is TensorDataset:
        return _array(data.tensors[-1]) if len(data.tensors) > 1 else None
    if not reads:
        return None
    with rng_preserved():  # rows may draw
        targets = [split(data[index])[1] for index in range(len(data))]
    return None if targets[0] is None else np.stack([_array(target) for target in targets])


def _splitter(folds: int, rows: int, classes: NDArray[Any] | None, *, groups: Any, seed: int) -> Any:
    """The splitter that a number stands for: shuffled, by group or by class where there are any."""
    from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

    if isinstance(folds, bool) or not 2 <= folds <= rows:
        want = f"a whole number from 2 to {rows}, the rows"
        raise SettingError(f"folds={folds!r}", want=want, fix="folds=5")
    if groups is not None:
        return GroupKFold(folds)
    if classes is not None and classes.ndim == 1 and classes.dtype.kind in "biu":
        counts = np.unique(classes, return_counts=True)[1]
        if len(counts) > 1 and counts.min() >= folds:
            return StratifiedKFold(folds, shuffle=True, random_state=mixed_seed(seed, 1))
    return KFold(folds, shuffle=True, random_state=mixed_seed(seed, 1))


def _given(folds: Any) -> list[Any]:
    if isinstance(folds, Iterable) and not isinstance(folds, str | bytes | dict):
        return list(folds)
    raise SettingError(
        f"folds={folds!r}",
        want="a number, a splitter of scikit-learn, or pairs (rows to train on, rows held out)",
        fix="folds=5, or folds=StratifiedKFold(5, shuffle=True, random_state=0)",
    )


def _checked(pair: Any, index: int, *, rows: int, groups: NDArray[Any] | None) -> tuple[Rows, Rows]:
    """One split as two arrays of row numbers, without a row or a group on both sides."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise SettingError(f"fold {index} is {pair!r}", want="a pair: (rows to train on, rows held out)")
    train, held_out = (_numbers(part, index, rows) for part in pair)
    shared = np.intersect1d(train, held_out)
    if shared.size:
        raise DataError(
            f"fold {index} leaks: {shared.size} rows are trained on and held out",
            have=f"row {int(shared[0])}" + (" and others" if shared.size > 1 else ""),
            want="rows that are on one side only",
        )
    if groups is not None:
        both = sorted({*groups[train].tolist()} & {*groups[held_out].tolist()})
        if both:
            raise DataError(
                f"fold {index} leaks: {len(both)} groups are trained on and held out",
                have=f"group {both[0]!r}" + (" and others" if len(both) > 1 else ""),
                want="a splitter that keeps groups together",
                fix="folds=GroupKFold(5), or a number of folds",
            )
    return train, held_out


def _numbers(part: Any, index: int, rows: int) -> Rows:
    numbers = _array(part)
    want = f"row numbers from 0 to {rows - 1}, each once, at least one"
    fits = numbers.ndim == 1 and numbers.size and numbers.dtype.kind in "iu"
    if not fits or numbers.min() < 0 or numbers.max() >= rows or len(np.unique(numbers)) < len(numbers):
        have = f"{numbers.size} of {numbers.dtype}" if not fits else f"{numbers.min()} to {numbers.max()}"
        raise SettingError(f"the rows of fold {index}", have=have, want=want)
    return numbers.astype(np.int64)


def _column(given: Any, name: str, rows: int) -> NDArray[Any]:
    values = _array(given)
    if values.ndim < 1 or len(values) != rows:
        have = "a single value" if values.ndim < 1 else f"{len(values)} values for {rows} rows"
        raise DataError(f"{name}=", have=have, want="one value for each row")
    return values


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _is_sklearns(splitter: Any) -> bool:
    """Whether a splitter is one of scikit-learn's own: those without groups warn where they are given some."""
    return type(splitter).__module__.startswith("sklearn.")
