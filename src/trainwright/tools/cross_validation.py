"""Cross-validation: a fresh trainer per fold, reproducible folds, and an error if a fold would leak."""

from __future__ import annotations

import inspect
import math
import statistics
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainwright.core.checks import check_choice, check_number, check_whole
from trainwright.core.device import change
from trainwright.core.errors import DataError, SettingError, first_line
from trainwright.core.records import Result
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.suggestions import suggests
from trainwright.core.trees import sequence_like, tensors_in
from trainwright.data.opening import batches, takes_batch_size
from trainwright.data.seeded import mixed_seed, open_rows
from trainwright.evaluation.predictions import join
from trainwright.modules.freezing import has_running_statistics, held
from trainwright.observers.table import aligned, duration, number
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
    seed: int = 0,
    resume: str | None = None,
) -> CrossValidation:
    """Train on all rows except a fold's and evaluate on the fold, for each fold.

    Returns the numbers and the out-of-fold predictions. `fit` never sees the held-out rows: early stopping, and all
    that monitors `val_...`, uses `validation`. Each fold starts from a random state by `seed` and its held-out rows, so
    that the order of the folds does not matter. The random state of the process is restored.

    Args:
        make_trainer: A function `make_trainer()`, or `make_trainer(fold)`, that builds a fresh trainer with a fresh
            model.
        data: A tuple or dict of arrays or tensors, or a map-style data set.
        folds: A splitter of scikit-learn, pairs (training rows, held-out rows), or a number of shuffled folds: by
            `GroupKFold` with `groups`, by `StratifiedKFold` if the target holds classes with enough rows each, else by
            `KFold`.
        batch_size: Rows per batch.
        epochs: Epochs per fold.
        groups: The group of each row. All rows of a group are in one fold.
        target: The class of each row. None: the last column of a tuple.
        prepare: A function `prepare(train, *others)` that returns all of them, such as scaled by statistics of `train`,
            or as `batches(...)`.
        validation: Share of the training rows for validation, such as 0.1.
        seed: Seed of the folds, and of the initial random state of each fold.
        resume: "auto" resumes folds from their checkpoints.

    Raises:
        SettingError: For a trainer or weights used in two folds, and for other leaks.
    """
    _check_settings(validation, seed=seed, resume=resume)
    rows = len(open_rows(data, None))  # DataError for data without numbered rows
    sides = _split(folds, data, rows, target=target, groups=groups, validation=validation, seed=seed)
    earlier, done = _EarlierFolds(), list[Fold]()
    for index, parts in enumerate(sides):
        fold_seed = _fold_seed(seed, parts[-1])
        try:
            with rng_preserved():
                start_random_state(fold_seed)
                trainer = _make(make_trainer, index)
                earlier.refuse_shared(trainer, index)
                train, *others = _prepared(prepare, [_take(data, part) for part in parts])
                if takes_batch_size(train):
                    train = batches(train, batch_size, shuffle=True, seed=fold_seed)
                *val, held_out = [batches(one, batch_size) if takes_batch_size(one) else one for one in others]
                result = trainer.fit(train, *val, epochs=epochs, resume=resume)
                numbers = trainer.evaluate(held_out, name="held_out")
                numbers = {name.removeprefix("held_out_"): value for name, value in numbers.items()}
                outputs = trainer.predict(held_out)
                done.append(Fold(parts[-1], len(parts[0]), fold_seed, numbers, result, outputs))
        except Exception as error:
            given = "" if validation is not None else ", without validation=0.1: fit has no rows to validate on"
            error.add_note(f"in fold {index} of {len(sides)}, counted from 0{given}")
            raise
    return CrossValidation(tuple(done), rows, seed)


def _fold_seed(seed: int, held_out: Rows) -> int:
    """Return the seed of a fold, by its held-out rows: it does not depend on the order of the folds."""
    return mixed_seed(seed, zlib.crc32(np.sort(held_out).tobytes()))


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One fold: the numbers and predictions of its model on the held-out rows."""

    rows: Rows = field(repr=False)
    """Positions of the held-out rows in the data."""
    trained: int
    """Number of training rows."""
    seed: int
    """Seed of all random states: a function of the seed of the cross-validation and the held-out rows."""
    numbers: dict[str, float]
    """Exact means over the held-out rows: `loss`, and each metric."""
    result: Result = field(repr=False)
    """The result of `fit`."""
    predictions: Any = field(repr=False)
    """The outputs of `predict` for the held-out rows, in the order of `rows`."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything except predictions and result as plain data."""
        return {"rows": self.rows.tolist(), "trained": self.trained, "seed": self.seed, "numbers": dict(self.numbers)}


@dataclass(frozen=True, slots=True, eq=False)
class CrossValidation:
    """The folds of a cross-validation. `print` shows a table of their numbers, with mean and standard deviation."""

    folds: tuple[Fold, ...]
    rows: int
    """Number of rows of the data."""
    seed: int
    """Seed of shuffled folds, and of the seeds of all folds."""

    @property
    def mean(self) -> dict[str, float]:
        """The unweighted mean of each number over the folds."""
        return {name: statistics.fmean(values) for name, values in self._values().items()}

    @property
    def std(self) -> dict[str, float]:
        """The standard deviation of each number over the folds, by n - 1. NaN for one fold or a non-finite value."""
        known = {name: len(one) > 1 and all(map(math.isfinite, one)) for name, one in self._values().items()}
        return {name: statistics.stdev(one) if known[name] else math.nan for name, one in self._values().items()}

    @property
    def held_out(self) -> Tensor:
        """Number of folds that hold out each row. Shape (rows,), int64."""
        return torch.from_numpy(np.bincount(np.concatenate([fold.rows for fold in self.folds]), minlength=self.rows))

    @property
    def predictions(self) -> Any:
        """The out-of-fold outputs: for each row, by the model that was not trained on it, in data order.

        Rows that no fold holds out, such as the first ones of a time series, are NaN; `held_out` is 0 there. DataError
        for rows held out more than once, for outputs of several shapes, and for integer outputs with missing rows:
        `folds[i].predictions` then holds the outputs of each fold.
        """
        rows = torch.from_numpy(np.concatenate([fold.rows for fold in self.folds]))
        missing, most = int((self.held_out == 0).sum()), int(self.held_out.max())
        outputs = join([fold.predictions for fold in self.folds])
        have = f"a row that was held out {most} times" if most > 1 else ""
        for output in tensors_in(outputs):
            if isinstance(outputs, list) or len(output) != len(rows):
                have = have or "outputs of several shapes"
            elif missing and not output.is_floating_point():
                have = have or f"{output.dtype}, and {missing} rows were never held out"
        if have:
            raise DataError(
                "the predictions of the folds cannot be one tensor in the order of the data",
                have=have,
                want="folds that hold each row out once, and one shape for each row",
                fix="the predictions of each fold, for its rows: folds[i].predictions, folds[i].rows",
            )

        def in_order(output: Tensor) -> Tensor:
            ordered = output.new_full((self.rows, *output.shape[1:]), math.nan if missing else 0)
            ordered[rows] = output
            return ordered

        return change(outputs, torch.device("cpu"), in_order)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except predictions and histories as plain data."""
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
        return "\n".join(aligned(lines))

    def _values(self) -> dict[str, list[float]]:
        """Return name -> values of all folds, in order."""
        return {name: [fold.numbers[name] for fold in self.folds] for name in self.folds[0].numbers}


def _split(
    folds: Any, data: Any, rows: int, *, target: Any, groups: Any, validation: float | None, seed: int
) -> Sequence[tuple[Rows, ...]]:
    """Return for each fold its training rows, its validation rows if there are any, and its held-out rows."""
    columns = data.tensors if type(data) is TensorDataset else data
    if target is None and isinstance(columns, tuple | dict) and columns:
        target = split(columns)[1]
    classes, groups = _column(target, "target", rows), _column(groups, "groups", rows)
    try:
        with rng_preserved():  # scikit-learn's import may draw, and a splitter without a random_state does
            splitter = _splitter(folds, classes, groups=groups, seed=seed)
            kind = type(splitter)
            classes = classes if "Stratified" in kind.__name__ else None
            # Splitters of scikit-learn that ignore groups warn if they get some.
            reads_groups = "Group" in kind.__name__ or not kind.__module__.startswith("sklearn.")
            start_random_state(mixed_seed(seed, 0))
            found = list(splitter.split(np.zeros(rows), classes, groups if reads_groups else None))
        given = [(_array(train), _array(held_out)) for train, held_out in found]
        if not given:
            raise ValueError("folds without one split")
    except (TypeError, ValueError) as error:
        want = "a number, a splitter of scikit-learn, or a pair (rows to train on, rows held out) for each fold"
        fix = f"folds=5 (from 2 to {rows}); for a stratified splitter also target=classes, the class of each row"
        raise SettingError(f"folds={folds!r}", have=first_line(error), want=want, fix=fix) from error
    pairs = [_checked(pair, index, rows=rows, groups=groups) for index, pair in enumerate(given)]
    if validation is None:
        return pairs
    if all(train.max() < held_out.min() for train, held_out in pairs):  # a time series: trained on earlier rows
        cuts = [len(train) - max(1, round(validation * len(train))) for train, _ in pairs]
        return [(train[:cut], train[cut:], held_out) for cut, (train, held_out) in zip(cuts, pairs, strict=True)]
    drawn = partial(_drawn, validation, classes=classes, groups=groups)
    return [(*drawn(train, seed=_fold_seed(seed, held_out)), held_out) for train, held_out in pairs]


def _splitter(folds: Any, classes: NDArray[Any] | None, *, groups: Any, seed: int) -> Any:
    """Return a splitter of scikit-learn; for a number of folds by group, by class if possible, else shuffled."""
    from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold, check_cv

    if folds is not None and not isinstance(folds, Integral):  # check_cv takes None too, as five folds
        return check_cv(folds)
    if groups is not None:
        return GroupKFold(cast(int, folds))
    kind = KFold
    if classes is not None and classes.ndim == 1 and classes.dtype.kind in "biu":
        counts = np.unique(classes, return_counts=True)[1]
        kind = StratifiedKFold if len(counts) > 1 and counts.min() >= folds else KFold
    return kind(cast(int, folds), shuffle=True, random_state=mixed_seed(seed, 1))


def _drawn(share: float, train: Rows, *, classes: Any, groups: Any, seed: int) -> tuple[Rows, Rows]:
    """Draw (training rows, validation rows) from the training rows: complete groups if given, else by class."""
    from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit, StratifiedShuffleSplit

    kind = ShuffleSplit if classes is None else StratifiedShuffleSplit
    splitter = (kind if groups is None else GroupShuffleSplit)(1, test_size=share, random_state=seed)
    classes, groups = (None if column is None else column[train] for column in (classes, groups))
    fitted, validated = next(splitter.split(train, classes, groups))
    return np.sort(train[fitted]), np.sort(train[validated])


def _checked(pair: tuple[Any, Any], index: int, *, rows: int, groups: NDArray[Any] | None) -> tuple[Rows, Rows]:
    """Return the rows of a fold as int64. Refuses invalid row numbers, and a row or group on both sides."""
    for part in pair:
        listed = part.ndim == 1 and part.size and part.dtype.kind in "iu"
        if not listed or part.min() < 0 or part.max() >= rows or len(np.unique(part)) < len(part):
            have = f"{part.min()} to {part.max()}" if listed else f"{part.size} of {part.dtype}"
            want = f"row numbers from 0 to {rows - 1}, each once, at least one"
            raise SettingError(f"the rows of fold {index}", have=have, want=want)
    owners = {"rows": pair} if groups is None else {"rows": pair, "groups": (groups[pair[0]], groups[pair[1]])}
    for what, (train, held_out) in owners.items():
        shared = np.intersect1d(train, held_out)
        if shared.size:
            raise DataError(
                f"fold {index} leaks: {shared.size} {what} are trained on and held out",
                have=f"{what.removesuffix('s')} {shared[0].item()!r}" + (" and others" if shared.size > 1 else ""),
                want=f"{what} that are on one side only",
                fix="folds=GroupKFold(5), or a number of folds" if what == "groups" else "",
            )
    return pair[0].astype(np.int64), pair[1].astype(np.int64)


def _take(data: Any, rows: Rows) -> Any:
    """Return the given rows of the data, in the same kind of container."""
    if isinstance(data, Tensor | np.ndarray):
        return data[rows]
    if isinstance(data, dict):
        return {key: _take(column, rows) for key, column in data.items()}
    if isinstance(data, tuple):
        return sequence_like(data, [_take(column, rows) for column in data])
    return Subset(data, rows.tolist())


def _column(values: Any, name: str, rows: int) -> NDArray[Any] | None:
    if values is None:
        return None
    column = _array(values)
    if column.shape[:1] != (rows,):
        raise DataError(f"{name}=", have=f"{column.size} values for {rows} rows", want="one value for each row")
    return column


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


class _EarlierFolds:
    """The weights and directories of earlier folds. Weights are referenced weakly: released ones cannot leak."""

    def __init__(self) -> None:
        self._tensors: list[tuple[weakref.ref[Tensor], str]] = []
        self._directories: dict[Path, int] = {}

    def refuse_shared(self, trainer: Trainer[Any], fold: int) -> None:
        """Refuse a trainer that has trained, or shares weights, statistics or directory with another fold."""
        # By memory: two Parameters may share one tensor.
        known = {one.data_ptr(): name for ref, name in self._tensors if (one := ref()) is not None}
        tensors = list(_trained_tensors(trainer))
        again = [known[tensor.data_ptr()] for _, tensor in tensors if tensor.data_ptr() in known]
        if trainer._counters.updates or trainer.result is not None:
            again = ["a trainer that has been trained already"]
        if again:
            raise SettingError(
                f"make_trainer() gave {again[0]} again, to fold {fold}: it has seen the rows that are to be held out",
                want="a fresh model, optimizer and trainer at each call",
                fix="def make_trainer(): model = Net(); return Trainer(model, SGD(model.parameters()), ...)",
            )
        self._tensors += [(weakref.ref(tensor), f"{name} of fold {fold}") for name, tensor in tensors]
        if trainer.checkpoint is not None:
            directory = trainer.checkpoint.directory
            first = self._directories.setdefault(Path(directory).resolve(), fold)
            if first != fold:
                what = f"folds {first} and {fold} would write their checkpoints to one directory, {directory}"
                fix = 'def make_trainer(fold): ... checkpoint=Checkpoint(f"runs/fold{fold}")'
                raise SettingError(what, want="a directory for each", fix=fix)


def _trained_tensors(trainer: Trainer[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of trained weights, and of running statistics that training changes."""
    for root in trained_modules(trainer):
        found = [(f"weight {name!r}", one) for name, one in root.named_parameters() if one.requires_grad]
        is_switched = not any(module.training for module in root.modules())  # `fit` switches it to train mode
        for path, module in root.named_modules():
            if has_running_statistics(module) and not held(module) and (module.training or is_switched):
                found += [(f"statistics {name!r}", one) for name, one in module.named_buffers(path, recurse=False)]
        yield from (one for one in found if one[1].data_ptr())  # 0: an empty tensor, or one on the meta device


def _make(make_trainer: Callable[..., Any], fold: int) -> Trainer[Any]:
    """Return the trainer of a fold. A function with an argument without a default gets the number of the fold."""
    if not callable(make_trainer):
        want = "a function that builds a fresh trainer for each fold"
        fix = "def make_trainer(): return Trainer(...)"
        raise SettingError(f"make_trainer is a {type(make_trainer).__name__}", want=want, fix=fix)
    parameters = inspect.signature(make_trainer).parameters.values()
    needed = [one for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    made = make_trainer(fold) if len(needed) == 1 else make_trainer()
    if not isinstance(made, Trainer):
        raise SettingError(f"make_trainer() gave a {type(made).__name__}", want="a Trainer")
    return made


def _prepared(prepare: Callable[..., Any] | None, sets: list[Any]) -> list[Any]:
    given = sets if prepare is None else prepare(*sets)
    if not isinstance(given, tuple | list) or len(given) != len(sets):
        have = f"{len(given)} of them" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
        want = f"{len(sets)} data sets: the training rows, and the others as they were given"
        raise SettingError("what prepare(train, *others) gave", have=have, want=want)
    return list(given)


def _check_settings(validation: Any, *, seed: Any, resume: Any) -> None:
    if validation is not None:
        written, what = f"cross_validate(validation={validation!r})", "a share of the training rows,"
        check_number(validation, written, above=0, below=1, what=what, fix="validation=0.1")
    check_whole(seed, f"cross_validate(seed={seed!r})", least=None, fix="seed=0")
    check_choice(resume, "cross_validate", "resume", choices=(None, "auto"), fix='resume="auto"')
