"""Search for settings: a grid, or Bayesian search by Optuna; a study on disk goes on as if it had never stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import torch

from trainwright.core.checks import check_choice, check_whole
from trainwright.core.errors import NonFiniteError, SettingError, first_line
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.data.seeded import mixed_seed
from trainwright.distributed.environment import read_environment
from trainwright.tools.tried import WHY, Tuned, tried_of

_BEGUN = "trainwright"
"""What a study keeps of the call that began it: its seed and its grid."""


@suggests
def tune(
    objective: Callable[[Any], float],
    *,
    mode: Literal["min", "max"],
    trials: int | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    sampler: Callable[[int], Any] | None = None,
    pruner: Any = "median",
    storage: str | Path | None = None,
    name: str = "study",
    seed: int | None = None,
    max_seconds: float | None = None,
    console: bool = True,
) -> Tuned:
    """Call `objective(trial)` for `trials` settings, those that did well leading to the next; return what was tried.

    The objective asks the Optuna trial for settings (`trial.suggest_float("lr", 1e-4, 1e-1, log=True)`), trains, and
    returns the number to make largest or smallest by `mode`. Without more it is Bayesian search (Optuna's TPE).
    `sampler`: a function of a seed that gives another sampler of Optuna's. `grid`: values by name; every combination
    is tried, in the order written, or the first `trials` of them. `pruner`: of the trials that `Pruning` reports,
    "median", None, or one of Optuna's. `constrain` refuses settings before they are trained.

    `storage`: the path of an SQLite file. A study there goes on until it has `trials` finished ones; a trial that was
    killed is done again, and all that follows is what it would have been: every trial starts from a random state
    of its own, by `seed` (None: drawn once, and kept) and its number. That of the process stays as it was. A trial
    whose loss was not finite is taken as pruned. Any other error ends the search; it can be called again.

    Raises SettingError without Optuna (`pip install "trainwright[tune]"`), for another mode, grid or seed than the
    study began with, and where another process is searching in the same file.
    """
    _check(objective, mode, trials=trials, grid=grid, sampler=sampler)
    _optuna()
    with ExitStack() as undo:
        url = None if storage is None else undo.enter_context(_alone(_path(storage)))
        study = _study(url, name, mode, pruner=pruner)
        search = _StudySearch(objective, study, _begun(study, seed, grid), grid=grid, sampler=sampler)
        total = min(trials or math.inf, len(search.points) or math.inf)
        deadline = math.inf if max_seconds is None else time.perf_counter() + max_seconds
        while len(search.finished()) < total and time.perf_counter() < deadline:
            search.step()
            if console:
                print(search.told(), flush=True)
    return Tuned(mode, tuple(map(tried_of, study.get_trials())), study)


@suggests
def constrain(trial: Any, name: str, value: float, *, at_most: float) -> None:
    """Hold a trial to a limit that can be told before training, such as its parameters; end it where it is beyond.

    The search is told by how much, as a share of `at_most`, and is led away from there; the trial counts as pruned and
    is never the best. Raises `optuna.TrialPruned`, through the objective.
    """
    optuna = _optuna()
    for what, number in (("value", value), ("at_most", at_most)):
        if isinstance(number, bool) or not isinstance(number, Real) or math.isnan(float(number)):
            raise SettingError(f"constrain({name!r}, {what}={number!r})", want="a number")
    trial.set_constraint(name, (float(value) - at_most) / (abs(at_most) or 1.0))
    if value > at_most:
        why = f"{name} {value:g} > {at_most:g}"
        trial.set_user_attr(WHY, why)
        raise optuna.TrialPruned(why)


class _StudySearch:
    """A study and how its next trial is made, which its finished trials and the seed alone decide."""

    def __init__(
        self,
        objective: Callable[[Any], float],
        study: Any,
        seed: int,
        *,
        grid: Any,
        sampler: Callable[[int], Any] | None,
    ) -> None:
        self.objective, self.study, self.seed, self.sampler = objective, study, seed, sampler
        self.points = [] if grid is None else [dict(zip(grid, one, strict=True)) for one in product(*grid.values())]
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished():  # its process is gone: this one alone holds the study
                study.tell(trial.number, state=_optuna().trial.TrialState.FAIL)

    def finished(self) -> list[Any]:
        """The trials that count: those that came to an end, pruned or not."""
        states = _optuna().trial.TrialState
        found: list[Any] = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return found

    def step(self) -> None:
        """Make the next trial and tell the study how it ended."""
        at, states = len(self.finished()), _optuna().trial.TrialState
        self.study.sampler = self._sampler_of(at)
        trial = self.study.ask()
        try:
            with rng_preserved():
                start_random_state(mixed_seed(self.seed, at, 1))
                value = _checked_value(self.objective(trial))
        except (_optuna().TrialPruned, NonFiniteError) as ended:
            if WHY not in trial.user_attrs:
                trial.set_user_attr(WHY, str(ended).splitlines()[0] if str(ended) else "")
            self.study.tell(trial, state=states.PRUNED)
        except BaseException as error:
            trial.set_user_attr(WHY, first_line(error))
            self.study.tell(trial, state=states.FAIL)
            error.add_note(f"in trial {trial.number} of the search, with {trial.params}")
            raise
        else:
            self.study.tell(trial, value)

    def told(self) -> str:
        """A line on the trial that was made last, and the best so far."""
        ended = list(map(tried_of, self.study.get_trials(deepcopy=False)))
        best = Tuned("max" if self.study.direction.name == "MAXIMIZE" else "min", tuple(ended), self.study).best
        mark = "  best so far" if best is not None and best.number == ended[-1].number else ""
        return f"{ended[-1]}{mark}"

    def _sampler_of(self, at: int) -> Any:
        """The sampler of one trial: made anew, so that it is the same after a restart."""
        if self.points:
            return _at_point(self.points[at])
        make = self.sampler or (lambda seed: _optuna().samplers.TPESampler(seed=seed))
        return make(mixed_seed(self.seed, at, 2))


def _at_point(point: Mapping[str, Any]) -> Any:
    """A sampler that gives the values of one point of a grid."""
    base: Any = _optuna().samplers.BaseSampler

    class Point(base):  # type: ignore[misc]
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, *asked: Any) -> Any:
            return _value_of(point, *asked[2:])

    return Point()


def _value_of(point: Mapping[str, Any], name: str, distribution: Any) -> Any:
    if name not in point:
        what = f"the objective asks for {name!r}, which the grid does not have.{did_you_mean(name, point)}"
        raise SettingError(what, have=", ".join(point), fix=f"grid={{..., {name!r}: [...]}}")
    value, choices = point[name], getattr(distribution, "choices", None)
    fits = value in choices if choices is not None else distribution.low <= value <= distribution.high
    if not fits:
        what = f"grid[{name!r}] has {value!r}, which the objective does not allow"
        raise SettingError(what, want=str(distribution))
    return value


def _checked_value(value: Any) -> float:
    """What an objective gave, as a number; one that is not finite is none to go by."""
    if isinstance(value, bool) or not (
        isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ):
        fix = 'return result.best.value, or result.history[-1]["val_accuracy"]'
        raise SettingError(f"the objective returned {value!r}", want="a number", fix=fix)
    if not math.isfinite(float(value)):
        raise NonFiniteError(f"the objective returned {float(value)}")
    return float(value)


def _study(url: str | None, name: str, mode: str, *, pruner: Any) -> Any:
    """Open the study, or begin it."""
    optuna = _optuna()
    if pruner == "median":
        pruner = optuna.pruners.MedianPruner()
    elif pruner is None:
        pruner = optuna.pruners.NopPruner()
    elif not isinstance(pruner, optuna.pruners.BasePruner):
        raise SettingError(f"pruner={pruner!r}", want='"median", None, or a pruner of Optuna')
    direction = {"min": "minimize", "max": "maximize"}[mode]
    with _quiet(optuna.logging):
        study = optuna.create_study(
            storage=url, study_name=name, direction=direction, pruner=pruner, load_if_exists=url is not None
        )
    if study.direction.name.lower() != direction:
        begun = "min" if mode == "max" else "max"
        what = f"the study {name!r} was begun with mode={begun!r}"
        raise SettingError(what, have=f"mode={mode!r}", fix=f'mode={begun!r}, or name="another"')
    return study


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Leave out Optuna's line that a study was made: its trials have lines of their own."""
    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _begun(study: Any, seed: int | None, grid: Mapping[str, Sequence[Any]] | None) -> int:
    """Return the seed of a study; refuse to go on with another seed or grid than it was begun with."""
    before = study.user_attrs.get(_BEGUN)
    now: dict[str, Any] = {"seed": seed, "grid": None if grid is None else {key: [*of] for key, of in grid.items()}}
    if before is None:
        if seed is None:
            now["seed"] = int(torch.empty((), dtype=torch.int64).random_())
        study.set_user_attr(_BEGUN, now)
        return int(now["seed"])
    for what in ("seed", "grid"):
        if json.dumps(now[what]) != json.dumps(before[what]) and not (what == "seed" and seed is None):
            told = f"the study {study.study_name!r} was begun with {what}={before[what]!r}"
            fix = 'name="another" for another search'
            raise SettingError(told, have=f"{what}={now[what]!r}", fix=fix)
    return int(before["seed"])


def _path(storage: str | Path) -> Path:
    text = str(storage).removeprefix("sqlite:///")
    if "://" in text:
        what = f"storage={str(storage)!r}"
        fix = "Optuna's own study.optimize(objective), in which Pruning works as it does here"
        raise SettingError(what, want="the path of an SQLite file", fix=fix)
    return Path(text).absolute()


@contextmanager
def _alone(path: Path) -> Iterator[str]:
    """Hold a study's file for this process, for as long as it searches; gives the file's address."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        warn(f"this system has no flock: two searches in {path} at once are not noticed", stacklevel=4)
        yield f"sqlite:///{path}"
        return
    with Path(f"{path}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fix = "wait for it, or another storage"
            raise SettingError(f"another process is searching in {path}", fix=fix) from None
        yield f"sqlite:///{path}"


def _check(objective: Any, mode: Any, *, trials: Any, grid: Any, sampler: Any) -> None:
    if not callable(objective):
        raise SettingError(f"objective={objective!r}", want="a function of a trial that returns a number")
    check_choice(mode, "tune", "mode", choices=("min", "max"), fix='mode="max" for an accuracy')
    if trials is not None:
        check_whole(trials, f"tune(trials={trials!r})", fix="trials=20")
    if grid is None and trials is None:
        raise SettingError("a search without an end", fix="trials=20, or grid={...}")
    if grid is not None and sampler is not None:
        raise SettingError("both grid= and sampler=", want="one of them")
    if grid is not None:
        _check_grid(grid)
    if (place := read_environment()) is not None:
        what = f"tune in one of {place.size} processes: each would search for itself"
        raise SettingError(what, want="one process", fix="python script.py")


def _check_grid(grid: Any) -> None:
    plain = (str, int, float, bool, type(None))
    if not isinstance(grid, Mapping) or not grid:
        raise SettingError(f"grid={grid!r}", want="values by name", fix='grid={"lr": [1e-3, 1e-2]}')
    for name, values in grid.items():
        listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values)
        if not listed or not all(isinstance(value, plain) for value in values):
            want = "a list of numbers, strings, booleans or None, at least one"
            raise SettingError(f"grid[{name!r}]={values!r}", want=want)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        what = "tune needs Optuna, which is not installed"
        raise SettingError(what, fix='pip install "trainwright[tune]"') from error
    if not hasattr(optuna.trial.FrozenTrial, "constraints"):
        what, have = "tune needs Optuna 5 or later", f"Optuna {optuna.__version__}"
        raise SettingError(what, have=have, fix='pip install --upgrade "trainwright[tune]"')
    return optuna
