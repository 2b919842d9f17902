"""Cross-validation: a fresh trainer for each fold, exact and reproducible, and what would leak refused."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.checks import check_choice, check_number, check_whole
from trainwright.core.errors import SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.suggestions import suggests
from trainwright.data.batches import batches
from trainwright.data.sources import takes_batch_size
from trainwright.modules.freezing import has_running_statistics, held
from trainwright.tools.folds import CrossValidation, Fold
from trainwright.tools.splitting import Rows, Splits, seed_of, split_rows, take
from trainwright.trainer import Trainer

_NAME = "held_out"
"""What numbers of rows held out are called while they are made; in a `Fold` they go by their own names."""


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
    predictions: bool = True,
    seed: int | None = None,
    resume: str | None = None,
) -> CrossValidation:
    """Train on all rows but a fold's and measure on those, for each fold; return numbers and out-of-fold predictions.

    `make_trainer()`, or `make_trainer(fold)`, builds a fresh trainer with a fresh model. `data`: a tuple or dict of
    arrays or tensors, or a map-style data set. `folds`: a splitter of scikit-learn, pairs (rows to train on, rows held
    out), or a number: then `GroupKFold` where `groups` are given, `StratifiedKFold` where the target, a tuple's last
    column, holds classes with enough rows each, else `KFold`; shuffled. `target`: what a stratified splitter reads, if
    not that. `prepare(train, *others)` gives them all back, scaled by what `train` holds, or as `batches(...)`.
    `fit` never sees the rows held out: early stopping, and all else that watches `val_...`, goes by `validation`, a
    share of the training rows, such as 0.1.

    Every fold starts from a random state of its own, by `seed` (None: drawn once) and the rows it holds out, so that
    the order of the folds does not matter, and leaves that of the process as it was. With `resume="auto"` folds go on
    from their checkpoints. Raises SettingError for a trainer or a model that is used twice, and for what else leaks.
    """
    _check_settings(validation, seed=seed, resume=resume)
    drawn = seed is None
    seed = int(torch.empty((), dtype=torch.int64).random_()) if seed is None else seed
    splits = split_rows(folds, data, target=target, groups=groups, seed=seed)
    course = _Course(
        data, splits, batch_size=batch_size, epochs=epochs, validation=validation, prepare=prepare, resume=resume
    )
    seen, done = _Seen(), list[Fold]()
    for index, (train, held_out) in enumerate(splits.pairs):
        number = seed_of(held_out, seed)
        try:
            with rng_preserved():
                start_random_state(number)
                trainer = seen.checked(_made(make_trainer, index), index)
                if drawn and trainer.world.size > 1:
                    what = "cross_validate without a seed in a run of several processes: each would draw its own"
                    raise SettingError(what, fix="cross_validate(..., seed=0)")
                done.append(course.run(trainer, train, held_out, seed=number, predicts=predictions))
        except Exception as error:
            error.add_note(f"in fold {index} of {len(splits.pairs)}, counted from 0")
            raise
    return CrossValidation(tuple(done), splits.rows, seed)


@dataclass(frozen=True, slots=True)
class _Course:
    """What is done alike in every fold."""

    data: Any
    splits: Splits
    batch_size: int
    epochs: int
    validation: float | None
    prepare: Callable[..., tuple[Any, ...]] | None
    resume: str | None

    def run(self, trainer: Trainer[Any], train: Rows, held_out: Rows, *, seed: int, predicts: bool) -> Fold:
        """Train and measure one fold."""
        sides = [train, held_out]
        if self.validation is None:
            _refuse_watching(trainer)
        else:
            sides = [*self.splits.put_aside(train, self.validation, seed=seed), held_out]
        sets = self._prepared([take(self.data, rows) for rows in sides])
        source, val = sets[0], (sets[1] if len(sets) == 3 else None)
        if takes_batch_size(source):
            source = batches(source, self.batch_size, shuffle=True, seed=seed)
        result = trainer.fit(source, self._batches(val), epochs=self.epochs, resume=self.resume)
        left = self._batches(sets[-1])
        numbers = {name.removeprefix(f"{_NAME}_"): value for name, value in trainer.evaluate(left, name=_NAME).items()}
        outputs = trainer.predict(left) if predicts else None
        return Fold(held_out, len(sides[0]), seed, numbers, result, outputs)

    def _prepared(self, sets: list[Any]) -> list[Any]:
        if self.prepare is None:
            return sets
        given = self.prepare(*sets)
        if not isinstance(given, tuple | list) or len(given) != len(sets):
            have = f"{len(given)} of them" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
            want = f"{len(sets)} data sets: the training rows, and the others as they were given"
            raise SettingError("what prepare(train, *others) gave", have=have, want=want)
        return list(given)

    def _batches(self, data: Any) -> Any:
        return batches(data, self.batch_size) if data is not None and takes_batch_size(data) else data


class _Seen:
    """The trainers of the folds so far and what they were made of, held weakly: what is gone cannot leak."""

    def __init__(self) -> None:
        self._things: list[tuple[weakref.ref[Any], str, int]] = []
        self._directories: dict[Path, int] = {}

    def checked(self, trainer: Trainer[Any], fold: int) -> Trainer[Any]:
        """Refuse a trainer that another fold has used, or that shares with it what is trained or written."""
        if trainer._counters.updates or trainer.result is not None:
            raise _leak("a trainer that has been trained already", "fold 0" if not fold else f"fold {fold}")
        things = _trained_things(trainer)
        before = {_identity(thing): (what, at) for ref, what, at in self._things if (thing := ref()) is not None}
        for thing, _ in things:
            if (found := before.get(_identity(thing))) is not None:
                raise _leak(f"{found[0]} of fold {found[1]}", f"fold {fold}")
        self._things += [(weakref.ref(thing), what, fold) for thing, what in things]
        self._check_directory(trainer, fold)
        return trainer

    def _check_directory(self, trainer: Trainer[Any], fold: int) -> None:
        directory = getattr(trainer.checkpoint, "directory", None)
        if directory is None:
            return
        at = self._directories.setdefault(Path(directory).resolve(), fold)
        if at != fold:
            what = f"folds {at} and {fold} would write their checkpoints to one directory, {directory}"
            fix = 'def make_trainer(fold): ... checkpoint=Checkpoint(f"runs/fold{fold}")'
            raise SettingError(what, want="a directory for each", fix=fix)


def _trained_things(trainer: Trainer[Any]) -> list[tuple[Any, str]]:
    """What must be new in every fold, the largest first: the trainer, its model, optimizers and weights."""
    things: list[tuple[Any, str]] = [(trainer, "the trainer"), (trainer.model, "the model")]
    things += [(optimizer, "the optimizer") for optimizer in trainer.optimizers.values()]
    trained = [(f"weight {name!r}", one) for name, one in trainer.model.named_parameters() if one.requires_grad]
    if isinstance(trainer.loss, nn.Module):
        trained += [(f"the loss's weight {name!r}", one) for name, one in trainer.loss.named_parameters()]
    trained += [(f"statistics {name!r}", one) for name, one in _moved(trainer.model)]
    return things + [(one, what) for what, one in trained]


def _moved(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The running statistics, by name, that a fold moves: those of layers which are not kept in eval mode."""
    modules = list(model.named_modules())
    wakes = not any(module.training for _, module in modules)  # `fit` switches such a model to train mode
    return [
        (f"{name}.{key}" if name else key, buffer)
        for name, module in modules
        if has_running_statistics(module) and not held(module) and (module.training or wakes)
        for key, buffer in module.named_buffers(recurse=False)
    ]


def _identity(thing: Any) -> tuple[str, int]:
    """What tells one thing from another: of weights the memory, so that one `Parameter` around another's is seen."""
    if isinstance(thing, Tensor) and thing.numel() and not thing.is_meta:
        return "memory", thing.data_ptr()
    return "object", id(thing)


def _leak(what: str, fold: str) -> SettingError:
    return SettingError(
        f"make_trainer() gave {what} again, to {fold}: it has seen the rows that are to be held out",
        want="a fresh model, optimizer and trainer at each call",
        fix="def make_trainer(): model = Net(); return Trainer(model, torch.optim.AdamW(model.parameters()), ...)",
    )


def _made(make_trainer: Callable[..., Any], fold: int) -> Trainer[Any]:
    """A trainer for a fold; its number is given where the function asks for one."""
    if isinstance(make_trainer, Trainer) or not callable(make_trainer):
        what = f"make_trainer is a {type(make_trainer).__name__}"
        want = "a function that builds a fresh trainer for each fold"
        raise SettingError(what, want=want, fix="def make_trainer(): return Trainer(...)")
    made = make_trainer(fold) if _asks(make_trainer) else make_trainer()
    if not isinstance(made, Trainer):
        raise SettingError(f"make_trainer() gave a {type(made).__name__}", want="a Trainer")
    return made


def _asks(make_trainer: Callable[..., Any]) -> bool:
    """Whether a function has one argument that it cannot be called without."""
    try:
        parameters = inspect.signature(make_trainer).parameters.values()
    except (TypeError, ValueError):  # a function in C that does not tell its arguments
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([one for one in parameters if one.kind in by_place and one.default is one.empty]) == 1


def _refuse_watching(trainer: Trainer[Any]) -> None:
    """Refuse a trainer that goes by validation numbers where there are no rows to take them from."""
    watched = {
        "early_stopping": getattr(trainer.early_stopping, "monitor", None),
        "checkpoint": getattr(trainer.checkpoint, "best", None),
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
