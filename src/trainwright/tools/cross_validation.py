"""Cross-validation: a fresh trainer for each fold, reproducible folds, and an error where a fold would leak."""

from __future__ import annotations

import inspect
import math
import statistics
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainwright.core.checks import check_choice, check_number, check_whole
from trainwright.core.device import change
from trainwright.core.errors import DataError, SettingError
from trainwright.core.records import Result
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.suggestions import suggests
from trainwright.core.trees import sequence_like
from trainwright.data.opening import batches, takes_batch_size
from trainwright.data.seeded import mixed_seed, open_rows
from trainwright.evaluation.predictions import join
from trainwright.modules.freezing import has_running_statistics, held
from trainwright.observers.table import duration, number
from trainwright.trainer import Trainer
from trainwright.update.batches import split
from trainwright.update.trainer_like import trained_modules

Rows = NDArray[np.int64]


@suggests
def cross_validate(
    make_trainer: Callable[..., Trainer[Any]],
    data: Any,
    folds: Any,
    *,
    batch_size: int,
    epochs: int,
    groups: Any = None,
    target: Any = None,
    prepare: Callable[..., tuple[Any, ...]] | None = None,
    validation: float | None = None,
    seed: int | None = None,
    resume: str | None = None,
) -> CrossValidation:
    """Train on all rows but a fold's and measure on those, for each fold; return numbers and out-of-fold predictions.

    `make_trainer()`, or `make_trainer(fold)`, builds a fresh trainer with a fresh model. `data`: a tuple or dict of
    arrays or tensors, or a map-style data set. `folds`: a splitter of scikit-learn, pairs (rows to train on, rows held
    out), or a number: then `GroupKFold` where `groups` are given, `StratifiedKFold` where the target, a tuple's last
    column, holds classes with enough rows each, else `KFold`; shuffled. `target`: the class of each row, if it is not
    that column. `prepare(train, *others)` returns all of them, scaled by statistics of `train`, or as `batches(...)`.
    `fit` never sees the rows held out: early stopping, and all else that watches `val_...`, uses `validation`, a
    share of the training rows, such as 0.1.

    Every fold starts from a random state of its own, by `seed` (None: drawn once) and the rows it holds out, so that
    the order of the folds does not matter; the state of the process is restored. With `resume="auto"` folds resume
    from their checkpoints. Raises SettingError for a trainer or weights that are used twice, and for other leaks.
    """
    _check_settings(validation, seed=seed, resume=resume)
    drawn = seed is None
    seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed
    splits = _split(folds, data, target=target, groups=groups, seed=seed)
    seen, done = _Seen(), list[Fold]()
    for index, (train, held_out) in enumerate(splits.pairs):
        fold_seed = mixed_seed(seed, zlib.crc32(np.sort(held_out).tobytes()))
        try:
            with rng_preserved():
                start_random_state(fold_seed)
                trainer = _make(make_trainer, index)
                seen.check(trainer, index)
                if drawn and trainer.world.size > 1:
                    what = "cross_validate without a seed in a run of several processes: each would draw its own"
                    raise SettingError(what, fix="cross_validate(..., seed=0)")
                if validation is None:
                    _refuse_watching(trainer)
                    sides = [train, held_out]
                else:
                    sides = [*splits.split_off(train, validation, seed=fold_seed), held_out]
                sets = _prepared(prepare, [_take(data, rows) for rows in sides])
                fit = partial(trainer.fit, epochs=epochs, resume=resume)
                numbers, result, outputs = _run(trainer, fit, sets, batch_size=batch_size, seed=fold_seed)
                done.append(Fold(held_out, len(sides[0]), fold_seed, numbers, result, outputs))
        except Exception as error:
            error.add_note(f"in fold {index} of {len(splits.pairs)}, counted from 0")
            raise
    return CrossValidation(tuple(done), splits.rows, seed)


def _run(
    trainer: Trainer[Any], fit: Callable[..., Result], sets: Sequence[Any], *, batch_size: int, seed: int
) -> tuple[dict[str, float], Result, Any]:
    """Train one fold, and measure it on the last of the sets; return numbers, result and predictions."""
    train, *others = sets
    if takes_batch_size(train):
        train = batches(train, batch_size, shuffle=True, seed=seed)
    others = [batches(one, batch_size) if takes_batch_size(one) else one for one in others]
    result = fit(train, others[0] if len(others) == 2 else None)
    numbers = trainer.evaluate(others[-1], name="held_out")
    numbers = {name.removeprefix("held_out_"): value for name, value in numbers.items()}
    return numbers, result, trainer.predict(others[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One fold: a model trained on some rows, and its numbers on the rows that were held out."""

    rows: Rows = field(repr=False)
    """The rows that were held out, by their positions in the data."""
    trained: int
    """The number of rows in training."""
    seed: int
    """The seed of every random state: a function of the seed of the cross-validation and of the rows held out."""
    numbers: dict[str, float]
    """Exact means over the rows held out: `loss`, and each metric."""
    result: Result = field(repr=False)
    """The result of `fit`."""
    predictions: Any = field(repr=False)
    """The result of `predict` for the rows held out, in the order of `rows`."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything but predictions and the result, as plain data."""
        return {"rows": self.rows.tolist(), "trained": self.trained, "seed": self.seed, "numbers": dict(self.numbers)}


@dataclass(frozen=True, slots=True, eq=False)
class CrossValidation:
    """The folds of a cross-validation; printed, it is a table of their numbers with mean and standard deviation."""

    folds: tuple[Fold, ...]
    rows: int
    """Rows of the data."""
    seed: int
    """The seed of shuffled folds, and of the seeds of all folds."""

    @property
    def mean(self) -> dict[str, float]:
        """The plain mean over the folds of each number: the estimate for a model trained on so many rows."""
        return {name: statistics.fmean(values) for name, values in self._values().items()}

    @property
    def std(self) -> dict[str, float]:
        """The standard deviation between the folds, by n - 1; NaN for one fold, or where a value is not finite."""
        known = {name: len(one) > 1 and all(map(math.isfinite, one)) for name, one in self._values().items()}
        return {name: statistics.stdev(one) if known[name] else math.nan for name, one in self._values().items()}

    @property
    def held_out(self) -> Tensor:
        """The number of folds that hold each row out. Shape (rows,), int64."""
        return torch.from_numpy(np.bincount(np.concatenate([fold.rows for fold in self.folds]), minlength=self.rows))

    @property
    def predictions(self) -> Any:
        """The outputs for every row by the model that has not seen it, in the order of the data.

        Rows that no fold holds out (a time series' first ones) are NaN; `held_out` is 0 there. Raises DataError for
        rows held out more than once, outputs of several shapes, and integers with rows missing.
        `folds[i].predictions` holds those of each fold in any case.
        """
        times, rows = self.held_out, torch.from_numpy(np.concatenate([fold.rows for fold in self.folds]))
        missing = torch.nonzero(times == 0).flatten()

        def in_order(output: Tensor) -> Tensor:
            if len(output) != len(rows):
                raise _apart("outputs of several shapes")
            if len(missing) and not output.is_floating_point():
                raise _apart(f"{output.dtype}, and {len(missing)} rows were never held out")
            room = output.new_full((self.rows, *output.shape[1:]), math.nan if len(missing) else 0)
            room[rows] = output
            return room

        if int(times.max()) > 1:
            raise _apart(f"a row that was held out {int(times.max())} times")
        outputs = join([fold.predictions for fold in self.folds])
        if isinstance(outputs, list):
            raise _apart("outputs of several shapes")
        return change(outputs, torch.device("cpu"), in_order)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but predictions and histories, as plain data."""
        folds = [fold.to_dict() for fold in self.folds]
        return {"rows": self.rows, "seed": self.seed, "mean": self.mean, "std": self.std, "folds": folds}

    def __str__(self) -> str:
        """Return the table."""
        mean, std = self.mean, self.std
        lines = [["fold", "rows", *mean, "epochs", "time"]]
        for index, fold in enumerate(self.folds):
            numbers = [number(fold.numbers[name]) for name in mean]
            ended = [str(fold.result.epochs), duration(fold.result.seconds)]
            lines.append([str(index), str(len(fold.rows)), *numbers, *ended])
        lines.append(["mean", "", *map(number, mean.values()), "", ""])
        lines.append(["std", "", *map(number, std.values()), "", ""])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)

    def _values(self) -> dict[str, list[float]]:
        """Return each number of all folds, in their order."""
        return {name: [fold.numbers[name] for fold in self.folds] for name in self.folds[0].numbers}


def _apart(have: str) -> DataError:
    return DataError(
        "the predictions of the folds cannot be one tensor in the order of the data",
        have=have,
        want="folds that hold each row out once, and one shape for each row",
        fix="the predictions of each fold, for its rows: folds[i].predictions, folds[i].rows",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Splits:
    """The rows of every fold, and the columns that a split of its training rows depends on."""

    rows: int
    pairs: tuple[tuple[Rows, Rows], ...]
    """(rows to train on, rows held out) of each fold."""
    classes: NDArray[Any] | None
    """The class of every row, where the folds are stratified."""
    groups: NDArray[Any] | None

    def split_off(self, train: Rows, share: float, *, seed: int) -> tuple[Rows, Rows]:
        """Split training rows into those to fit and those to validate on.

        Of a time series the last ones; complete groups where there are groups; else drawn, by class where folds are.
        """
        if all(one.max() < held_out.min() for one, held_out in self.pairs):  # trained on rows that come before
            cut = len(train) - max(1, round(share * len(train)))
            return train[:cut], train[cut:]
        from sklearn.model_selection import GroupShuffleSplit, train_test_split

        if self.groups is not None:
            splitter = GroupShuffleSplit(1, test_size=share, random_state=seed)
            fitted, validated = next(splitter.split(train, groups=self.groups[train]))
            return train[np.sort(fitted)], train[np.sort(validated)]
        classes = None if self.classes is None else self.classes[train]
        fitted, validated = train_test_split(train, test_size=share, random_state=seed, stratify=classes)
        return np.sort(fitted), np.sort(validated)


def _split(folds: Any, data: Any, *, target: Any, groups: Any, seed: int) -> _Splits:
    """Return the rows of every fold; DataError where a row, or a group, is on both sides of one."""
    rows = len(open_rows(data, None))  # DataError for data without numbered rows
    groups = None if groups is None else _column(groups, "groups", rows)
    classes = _last_column(data) if target is None else _column(target, "target", rows)
    splitter = _splitter(folds, rows, classes, groups=groups, seed=seed) if isinstance(folds, int) else folds
    kind = type(splitter)
    if "Stratified" not in kind.__name__:
        classes = None
    elif classes is None:
        what = f"{kind.__name__}, and the data have no target that is known"
        raise SettingError(what, want="the class of each row", fix="cross_validate(..., target=classes)")
    reads_groups = "Group" in kind.__name__ or not kind.__module__.startswith("sklearn.")  # others of sklearn's warn
    with rng_preserved():  # a splitter without a random_state draws from NumPy's global state
        start_random_state(mixed_seed(seed, 0))
        if hasattr(kind, "split") and kind is not str:
            pairs = list(splitter.split(np.zeros(rows), classes, groups if reads_groups else None))
        elif isinstance(folds, Iterable) and kind is not str:
            pairs = list(folds)
        else:
            want = "a number, a splitter of scikit-learn, or pairs (rows to train on, rows held out)"
            raise SettingError(f"folds={folds!r}", want=want, fix="folds=5, or folds=StratifiedKFold(5, shuffle=True)")
    if not pairs:
        raise SettingError("folds without one split", want="at least one pair of row numbers")
    checked = tuple(_checked(pair, index, rows=rows, groups=groups) for index, pair in enumerate(pairs))
    return _Splits(rows, checked, classes, groups)


def _splitter(folds: int, rows: int, classes: NDArray[Any] | None, *, groups: Any, seed: int) -> Any:
    """Return the splitter of scikit-learn for a number of folds: shuffled, by group or by class where there are any."""
    from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

    if isinstance(folds, bool) or not 2 <= folds <= rows:
        raise SettingError(f"folds={folds!r}", want=f"a whole number from 2 to {rows}, the rows", fix="folds=5")
    if groups is not None:
        return GroupKFold(folds)
    kind = KFold
    if classes is not None and classes.ndim == 1 and classes.dtype.kind in "biu":
        counts = np.unique(classes, return_counts=True)[1]
        kind = StratifiedKFold if len(counts) > 1 and counts.min() >= folds else KFold
    return kind(folds, shuffle=True, random_state=mixed_seed(seed, 1))


def _checked(pair: Any, index: int, *, rows: int, groups: NDArray[Any] | None) -> tuple[Rows, Rows]:
    """Return one split as two arrays of row numbers, without a row or a group on both sides."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise SettingError(f"fold {index} is {pair!r}", want="a pair: (rows to train on, rows held out)")
    train, held_out = (_array(part) for part in pair)
    for part in (train, held_out):
        listed = part.ndim == 1 and part.size and part.dtype.kind in "iu"
        if not listed or part.min() < 0 or part.max() >= rows or len(np.unique(part)) < len(part):
            have = f"{part.min()} to {part.max()}" if listed else f"{part.size} of {part.dtype}"
            want = f"row numbers from 0 to {rows - 1}, each once, at least one"
            raise SettingError(f"the rows of fold {index}", have=have, want=want)
    _refuse_leak("rows", train, held_out, index=index)
    if groups is not None:
        _refuse_leak("groups", groups[train], groups[held_out], index=index)
    return train.astype(np.int64), held_out.astype(np.int64)


def _refuse_leak(what: str, train: NDArray[Any], held_out: NDArray[Any], *, index: int) -> None:
    shared = np.intersect1d(train, held_out)
    if shared.size:
        raise DataError(
            f"fold {index} leaks: {shared.size} {what} are trained on and held out",
            have=f"{what.removesuffix('s')} {shared[0].item()!r}" + (" and others" if shared.size > 1 else ""),
            want=f"{what} that are on one side only",
            fix="folds=GroupKFold(5), or a number of folds" if what == "groups" else "",
        )


def _last_column(data: Any) -> NDArray[Any] | None:
    """Return the target column of data in memory; None where there is none."""
    if type(data) is TensorDataset:
        data = data.tensors
    known = isinstance(data, tuple | dict | Tensor) and len(data)
    target = split(data)[1] if known else None
    return None if target is None else _array(target)


def _take(data: Any, rows: Rows) -> Any:
    """Return those rows of the data, in the same kind of container."""
    if isinstance(data, Tensor):
        return data[torch.from_numpy(rows).to(data.device)]
    if isinstance(data, np.ndarray):
        return data[rows]
    if isinstance(data, dict):
        return {key: _take(column, rows) for key, column in data.items()}
    if isinstance(data, tuple):
        return sequence_like(data, [_take(column, rows) for column in data])
    return Subset(data, rows.tolist())


def _column(given: Any, name: str, rows: int) -> NDArray[Any]:
    values = _array(given)
    if values.ndim < 1 or len(values) != rows:
        have = "a single value" if values.ndim < 1 else f"{len(values)} values for {rows} rows"
        raise DataError(f"{name}=", have=have, want="one value for each row")
    return values


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


class _Seen:
    """The weights and directories of earlier folds; weights are held weakly, since released ones cannot leak."""

    def __init__(self) -> None:
        self._tensors: list[tuple[weakref.ref[Tensor], str, int]] = []
        self._directories: dict[Path, int] = {}

    def check(self, trainer: Trainer[Any], fold: int) -> None:
        """Refuse a trainer that has trained, or that shares weights, statistics or its directory with another fold."""
        if trainer._counters.updates or trainer.result is not None:
            raise _leak("a trainer that has been trained already", fold)
        # By memory, since a Parameter may be made of the tensor of another.
        before = {one.data_ptr(): (name, at) for ref, name, at in self._tensors if (one := ref()) is not None}
        for name, tensor in _trained_tensors(trainer):
            if tensor.numel() and not tensor.is_meta:
                if (found := before.get(tensor.data_ptr())) is not None:
                    raise _leak(f"{found[0]} of fold {found[1]}", fold)
                self._tensors.append((weakref.ref(tensor), name, fold))
        directory = None if trainer.checkpoint is None else trainer.checkpoint.directory
        at = fold if directory is None else self._directories.setdefault(Path(directory).resolve(), fold)
        if at != fold:
            what = f"folds {at} and {fold} would write their checkpoints to one directory, {directory}"
            fix = 'def make_trainer(fold): ... checkpoint=Checkpoint(f"runs/fold{fold}")'
            raise SettingError(what, want="a directory for each", fix=fix)


def _trained_tensors(trainer: Trainer[Any]) -> list[tuple[str, Tensor]]:
    """Return the trained weights, and the running statistics that training moves, with a name for messages."""
    found: list[tuple[str, Tensor]] = []
    for root in trained_modules(trainer):
        found += [(f"weight {name!r}", one) for name, one in root.named_parameters() if one.requires_grad]
        modules = list(root.named_modules())
        wakes = not any(module.training for _, module in modules)  # `fit` switches such a model to train mode
        for path, module in modules:
            if has_running_statistics(module) and not held(module) and (module.training or wakes):
                prefix = f"{path}." if path else ""
                found += [(f"statistics {prefix + name!r}", one) for name, one in module.named_buffers(recurse=False)]
    return found


def _leak(what: str, fold: int) -> SettingError:
    return SettingError(
        f"make_trainer() gave {what} again, to fold {fold}: it has seen the rows that are to be held out",
        want="a fresh model, optimizer and trainer at each call",
        fix="def make_trainer(): model = Net(); return Trainer(model, torch.optim.AdamW(model.parameters()), ...)",
    )


def _make(make_trainer: Callable[..., Any], fold: int) -> Trainer[Any]:
    """Return a trainer for a fold; its number is given to a function with one argument that has no default."""
    if isinstance(make_trainer, Trainer) or not callable(make_trainer):
        what = f"make_trainer is a {type(make_trainer).__name__}"
        want = "a function that builds a fresh trainer for each fold"
        raise SettingError(what, want=want, fix="def make_trainer(): return Trainer(...)")
    parameters = inspect.signature(make_trainer).parameters.values()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.kind in by_place and one.default is one.empty]
    made = make_trainer(fold) if len(needed) == 1 else make_trainer()
    if not isinstance(made, Trainer):
        raise SettingError(f"make_trainer() gave a {type(made).__name__}", want="a Trainer")
    return made


def _prepared(prepare: Callable[..., Any] | None, sets: list[Any]) -> list[Any]:
    if prepare is None:
        return sets
    given = prepare(*sets)
    if not isinstance(given, tuple | list) or len(given) != len(sets):
        have = f"{len(given)} of them" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
        want = f"{len(sets)} data sets: the training rows, and the others as they were given"
        raise SettingError("what prepare(train, *others) gave", have=have, want=want)
    return list(given)


def _refuse_watching(trainer: Trainer[Any]) -> None:
    """Refuse a trainer that monitors validation numbers where there are no rows to validate on."""
    early, checkpoint = trainer.early_stopping, trainer.checkpoint
    watched = {
        "early_stopping": None if early is None else early.monitor,
        "checkpoint": None if checkpoint is None else checkpoint.best,
    }
    for slot, monitor in watched.items():
        if isinstance(monitor, str) and monitor.startswith("val_"):
            what = f"{slot} watches {monitor!r}, and the rows held out are never shown to fit: the choice would leak"
            want = "a share of each fold's training rows to validate on"
            raise SettingError(what, want=want, fix="cross_validate(..., validation=0.1)")


def _check_settings(validation: Any, *, seed: Any, resume: Any) -> None:
    if validation is not None:
        written, what = f"cross_validate(validation={validation!r})", "a share of the training rows,"
        check_number(validation, written, above=0, below=1, what=what, fix="validation=0.1")
    if seed is not None:
        check_whole(seed, f"cross_validate(seed={seed!r})", least=None, fix="seed=0")
    check_choice(resume, "cross_validate", "resume", choices=(None, "auto"), fix='resume="auto"')
    if resume is not None and seed is None:
        what = 'resume="auto" without a seed: the folds would be others than those that were begun'
        raise SettingError(what, fix='cross_validate(..., seed=0, resume="auto")')
