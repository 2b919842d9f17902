"""What a cross-validation gives back: the folds, their mean and spread, and the outputs of rows held out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainwright.core.errors import DataError
from trainwright.core.records import Result
from trainwright.core.trees import sequence_like
from trainwright.observers.table import duration, number


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """One fold: a model trained on some rows, and its numbers on the rows that were held out."""

    rows: NDArray[np.int64] = field(repr=False)
    """The rows that were held out, by their numbers in the data."""
    trained: int
    """How many rows were trained on."""
    seed: int
    """What every random state was started from: it depends on the seed of the whole and on the rows held out."""
    numbers: dict[str, float]
    """Exact means over the rows held out: `loss`, and each metric."""
    result: Result = field(repr=False)
    """What `fit` gave."""
    predictions: Any = field(repr=False)
    """What `predict` gave for the rows held out, in the order of `rows`; None where it was not asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return what there is but the predictions and the history, as plain data."""
        result = self.result
        ended = {name: getattr(result, name) for name in ("updates", "epochs", "stopped", "seconds", "weights")}
        return {
            "rows": self.rows.tolist(),
            "trained": self.trained,
            "seed": self.seed,
            "numbers": dict(self.numbers),
            **ended,
        }


@dataclass(frozen=True, slots=True, eq=False)
class CrossValidation:
    """The folds of a cross-validation; printed, it is a table of their numbers with mean and standard deviation."""

    folds: tuple[Fold, ...]
    rows: int
    """Rows of the data."""
    seed: int
    """What the folds themselves, where they are shuffled, and the seeds of all of them come from."""

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that every fold has."""
        first = self.folds[0].numbers
        return tuple(name for name in first if all(name in fold.numbers for fold in self.folds))

    @property
    def mean(self) -> dict[str, float]:
        """The plain mean over the folds of each number: the estimate for a model trained on so many rows."""
        return {name: statistics.fmean(self._all(name)) for name in self.names}

    @property
    def std(self) -> dict[str, float]:
        """The standard deviation between the folds (by n - 1); NaN of a single one."""
        return {name: _deviation(self._all(name)) for name in self.names}

    @property
    def held_out(self) -> Tensor:
        """How often each row was held out. Shape (rows,), int64."""
        return torch.from_numpy(np.bincount(np.concatenate([fold.rows for fold in self.folds]), minlength=self.rows))

    @property
    def predictions(self) -> Any:
        """The outputs for every row by the model that has not seen it, in the order of the data.

        Rows that no fold holds out (a time series' first ones) are NaN; `held_out` tells which. Raises DataError
        where that cannot be: a row held out more than once, outputs of several shapes, integers with rows missing.
        `folds[i].predictions` holds those of each fold in any case.
        """
        if any(fold.predictions is None for fold in self.folds):
            raise DataError("the folds have made no predictions", fix="cross_validate(..., predictions=True)")
        most = int(self.held_out.max())
        if most > 1:
            raise DataError(
                f"a row was held out {most} times, so that there is no one prediction for it",
                want="folds that hold each row out once",
                fix="the predictions of each fold, for its rows: folds[i].predictions, folds[i].rows",
            )
        return self._laid([fold.predictions for fold in self.folds])

    def to_dict(self) -> dict[str, Any]:
        """Return everything but predictions and histories, as plain data."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "mean": self.mean,
            "std": self.std,
            "folds": [fold.to_dict() for fold in self.folds],
        }

    def __str__(self) -> str:
        """Return the table."""
        names = self.names
        lines = [["fold", "rows", *names, "epochs", "time"]]
        for index, fold in enumerate(self.folds):
            numbers = [number(fold.numbers[name]) for name in names]
            ended = [str(fold.result.epochs), duration(fold.result.seconds)]
            lines.append([str(index), str(len(fold.rows)), *numbers, *ended])
        mean, std = self.mean, self.std
        lines.append(["mean", "", *(number(mean[name]) for name in names), "", ""])
        lines.append(["std", "", *(number(std[name]) for name in names), "", ""])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)

    def _all(self, name: str) -> list[float]:
        return [fold.numbers[name] for fold in self.folds]

    def _laid(self, pieces: list[Any]) -> Any:
        """Lay the outputs of all folds, tensors or tuples and dicts of them, where their rows are."""
        first = pieces[0]
        if isinstance(first, Tensor):
            return self._whole(pieces)
        if isinstance(first, dict):
            return {key: self._laid([piece[key] for piece in pieces]) for key in first}
        if isinstance(first, tuple):
            return sequence_like(first, [self._laid(list(column)) for column in zip(*pieces, strict=True)])
        raise _apart(f"a {type(first).__name__}")

    def _whole(self, pieces: list[Tensor]) -> Tensor:
        first = pieces[0]
        if any(piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype for piece in pieces):
            raise _apart("tensors of several shapes or types")
        room = torch.empty((self.rows, *first.shape[1:]), dtype=first.dtype)
        missing = self.held_out == 0
        if missing.any():
            if not first.is_floating_point():
                raise _apart(f"{first.dtype}, and {int(missing.sum())} rows were never held out")
            room[missing] = math.nan
        for fold, piece in zip(self.folds, pieces, strict=True):
            room[torch.from_numpy(fold.rows)] = piece
        return room


def _deviation(values: list[float]) -> float:
    """The standard deviation by n - 1; NaN where a value is none, or where there is one alone."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def _apart(have: str) -> DataError:
    return DataError(
        "the predictions of the folds cannot be laid into one tensor",
        have=have,
        want="tensors of one shape for each row, or tuples and dicts of them",
        fix="the predictions of each fold, for its rows: folds[i].predictions, folds[i].rows",
    )
