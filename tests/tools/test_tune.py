"""Search: grids and Bayesian search, pruning, constraints, and studies that go on as if they had never stopped."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright import (
    Checkpoint,
    NonFiniteError,
    Pruning,
    SettingError,
    Trainer,
    Tuned,
    Updates,
    accuracy,
    batches,
    constrain,
    tune,
)

optuna: Any = pytest.importorskip("optuna", reason="needs the extra `tune`")

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
LOUD = {"console": False}


def fitted(trial: Any, lr: float, *, epochs: int = 3, **settings: Any) -> Any:
    model = nn.Linear(4, 2)
    observers = [Pruning(trial, settings.pop("monitor", "val_loss"), per=settings.pop("per", "epoch"))]
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        console=False,
        observers=observers,
    )
    return trainer.fit(batches((x, y), 16, shuffle=True, seed=0), batches((x, y), 48), epochs=epochs, **settings)


def trained(trial: Any) -> float:
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    trial.suggest_int("unused", 1, 9)
    return float(fitted(trial, lr).history[-1]["val_loss"])


def bowl(trial: Any) -> float:
    a, b = trial.suggest_float("a", -1, 1), trial.suggest_categorical("b", ["x", "y"])
    return float(a**2 + (b == "y"))


def told(found: Tuned) -> list[tuple[Any, ...]]:
    """What a search came to, but for trials that were cut off."""
    return [(trial.settings, trial.value, trial.ended) for trial in found.trials if trial.ended != "failed"]


def test_a_grid_is_tried_in_the_order_written() -> None:
    grid = {"b": ["y", "x"], "a": [0.5, -0.25]}
    found = tune(bowl, mode="min", grid=grid, **LOUD)
    assert [trial.settings for trial in found.trials] == [
        {"a": a, "b": b} for b, a in [("y", 0.5), ("y", -0.25), ("x", 0.5), ("x", -0.25)]
    ]
    assert found.best is not None and (found.best.settings, found.best.value) == ({"a": -0.25, "b": "x"}, 0.0625)
    largest = tune(bowl, mode="max", grid=grid, trials=2, **LOUD)
    assert len(largest.trials) == 2 and largest.best is not None and largest.best.value == 1.25


def test_bayesian_search_is_led_by_what_did_well_and_goes_by_its_seed() -> None:
    one, other = (tune(bowl, mode="min", trials=25, seed=3, **LOUD) for _ in range(2))
    assert told(one) == told(other) != told(tune(bowl, mode="min", trials=25, seed=4, **LOUD))
    first, last = ([abs(trial.settings["a"]) for trial in part] for part in (one.trials[:10], one.trials[-10:]))
    assert np.mean(last) < np.mean(first) / 2
    drawn = tune(bowl, mode="min", trials=3, seed=3, sampler=optuna.samplers.RandomSampler, **LOUD)
    assert len({trial.settings["a"] for trial in drawn.trials}) == 3


def test_the_random_state_of_the_process_stays_and_every_trial_has_its_own() -> None:
    drawn = list[float]()

    def noisy(trial: Any) -> float:
        drawn.append(torch.rand(()).item() + random.random() + float(np.random.rand()))
        return bowl(trial)

    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]
    tune(noisy, mode="min", trials=3, seed=0, **LOUD)
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert states == after and len(set(drawn)) == 3
    tune(noisy, mode="min", trials=3, seed=0, **LOUD)
    assert drawn[3:] == drawn[:3]


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_tune

def dying(trial):
    try:
        return test_tune.trained(trial)
    finally:
        if trial.number == 12:
            os.kill(os.getpid(), signal.SIGKILL)

test_tune.tune(dying, mode="min", trials=15, seed=5, storage={storage!r})
"""


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    storage = tmp_path / "runs" / "study.db"
    script = SCRIPT.format(here=str(Path(__file__).parent), storage=str(storage))
    killed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    resumed = tune(trained, mode="min", trials=15, storage=storage, **LOUD)
    whole = tune(trained, mode="min", trials=15, seed=5, **LOUD)
    assert [trial.number for trial in resumed.trials if trial.ended == "failed"] == [12]
    assert told(resumed) == told(whole) and len(whole.trials) == 15
    again = tune(lambda trial: pytest.fail("it is finished"), mode="min", trials=15, storage=storage, **LOUD)
    assert told(again) == told(whole)


@pytest.mark.slow
def test_a_grid_goes_on_at_the_combination_that_was_cut_off(tmp_path: Path) -> None:
    calls = list[float]()

    def failing(trial: Any) -> float:
        calls.append(trial.suggest_float("a", -1, 1))
        if len(calls) == 2:
            raise KeyError("the power went")
        return calls[-1]

    settings: dict[str, Any] = {"mode": "min", "grid": {"a": [0.1, 0.2, 0.3]}, "storage": tmp_path / "s.db", **LOUD}
    with pytest.raises(KeyError) as caught:
        tune(failing, **settings)
    assert "in trial 1 of the search, with {'a': 0.2}" in caught.value.__notes__
    found = tune(failing, **settings)
    assert calls == [0.1, 0.2, 0.2, 0.3] and [trial.ended for trial in found.trials][1] == "failed"
    assert found.trials[1].why == "KeyError: 'the power went'"


def test_pruning_ends_a_trial_after_the_epoch_and_changes_no_number_before() -> None:
    class After(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1 and len(trial.intermediate_values) == 2)

    found = tune(trained, mode="min", trials=2, seed=0, pruner=After(), **LOUD)
    assert [trial.ended for trial in found.trials] == ["complete", "pruned"]
    assert found.trials[1].value is None and found.trials[1].why.startswith("val_loss ")
    assert [list(trial.reports) for trial in found.trials] == [[1, 2, 3], [1, 2]]
    unpruned = tune(trained, mode="min", trials=2, seed=0, pruner=None, **LOUD)
    assert list(unpruned.trials[1].reports.items())[:2] == list(found.trials[1].reports.items())


def test_pruning_by_update_reports_every_validation() -> None:
    def by_update(trial: Any) -> float:
        return float(fitted(trial, 0.1, epochs=2, per="update", validate=Updates(2)).history[-1]["val_loss"])

    found = tune(by_update, mode="min", trials=1, **LOUD)
    assert list(found.trials[0].reports) == [2, 4, 6]


def test_pruning_works_in_a_study_of_optunas_own_and_in_a_trial_outside_of_any() -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e-6))
    study.optimize(trained, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]
    assert 0 < trained(optuna.trial.FixedTrial({"lr": 0.1, "unused": 1})) < 2


def test_a_number_that_there_is_not_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingError, match="Did you mean 'val_accuracy'"):
        tune(lambda trial: float(fitted(trial, 0.1, monitor="val_acuracy").updates), mode="max", trials=1, **LOUD)


@pytest.mark.parametrize(("monitor", "mode"), [("val_accuracy", "min"), ("val_loss", "max")])
def test_a_number_that_the_study_would_read_the_wrong_way_round_is_refused(monitor: str, mode: Any) -> None:
    with pytest.raises(SettingError, match=f"Pruning watches '{monitor}'"):
        tune(lambda trial: float(fitted(trial, 0.1, monitor=monitor).updates), mode=mode, trials=1, **LOUD)


def test_what_is_not_finite_is_pruned_and_never_the_best() -> None:
    def diverging(trial: Any) -> float:
        if trial.number == 0:
            raise NonFiniteError("the loss of update 3 is nan")
        return [math.nan, -math.inf, 2.0][trial.number - 1]

    found = tune(diverging, mode="min", trials=4, **LOUD)
    assert [trial.ended for trial in found.trials] == ["pruned"] * 3 + ["complete"]
    assert found.best is not None and found.best.value == 2.0
    assert found.trials[0].why == "the loss of update 3 is nan" and "nan" in found.trials[1].why
    assert tune(lambda trial: math.nan, mode="min", trials=1, **LOUD).best is None


def test_a_constraint_ends_a_trial_before_it_is_trained_and_leads_the_search_away() -> None:
    trained_at = list[int]()

    def limited(trial: Any) -> float:
        width = trial.suggest_int("width", 1, 100)
        constrain(trial, "parameters", 10 * width, at_most=200)
        trained_at.append(width)
        return float(width)  # the largest that is allowed is the best

    found = tune(limited, mode="max", trials=40, seed=0, **LOUD)
    assert found.best is not None and 12 < found.best.settings["width"] <= 20 and max(trained_at) <= 20
    beyond = [trial for trial in found.trials if trial.ended == "infeasible"]
    assert beyond and beyond[0].why == f"parameters {10 * beyond[0].settings['width']} > 200"
    excess = found.study.trials[beyond[0].number].constraints["parameters"]
    assert excess == pytest.approx((10 * beyond[0].settings["width"] - 200) / 200)
    late = sum(trial.ended == "infeasible" for trial in found.trials[-15:])
    assert late < sum(trial.ended == "infeasible" for trial in found.trials[:15])


def test_the_record_is_plain_data_and_a_table_with_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = tune(bowl, mode="min", grid={"a": [0.5, 0.0], "b": ["x"]})
    assert json.loads(json.dumps(found.to_dict()))["best"]["settings"] == {"a": 0.0, "b": "x"}
    assert str(found).splitlines()[0] == "2 trials: 2 complete" and str(found).splitlines()[1].startswith("trial   1")
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("best so far") for line in lines] == [True, True]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mode": "maximum"}, 'mode="max"'),
        ({"trials": None}, "without an end"),
        ({"trials": 0}, "at least 1"),
        ({"grid": {"a": []}}, "at least one"),
        ({"grid": {"a": [0.1]}, "sampler": lambda seed: None}, "both grid= and sampler="),
        ({"grid": {"aa": [0.1], "b": ["x"]}}, "Did you mean 'aa'"),
        ({"grid": {"a": [7], "b": ["x"]}}, "does not allow"),
        ({"grid": {"a": [0.1], "b": ["z"]}}, "does not allow"),
        ({"pruner": "best"}, "a pruner of Optuna"),
        ({"storage": "postgresql://host/db"}, "SQLite"),
        ({"objective": lambda trial: None}, "returned None"),
        ({"objective": 3}, "a function of a trial"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"objective": bowl, "mode": "min", "trials": 2, **LOUD, **settings}
    with pytest.raises(SettingError, match=match):
        tune(given.pop("objective"), **given)


@pytest.mark.slow
def test_a_study_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    storage = tmp_path / "study.db"
    grid = {"a": [0.1, 0.2], "b": ["x"]}
    tune(bowl, mode="min", grid=grid, trials=1, seed=1, storage=storage, **LOUD)
    for other, match in (
        ({"mode": "max"}, "begun with mode='min'"),
        ({"seed": 2}, "begun with seed=1"),
        ({"grid": {**grid, "a": [0.1, 0.3]}}, "begun with grid="),
    ):
        with pytest.raises(SettingError, match=match):
            tune(bowl, **{"mode": "min", "grid": grid, "storage": storage, **LOUD, **other})
    assert len(tune(bowl, mode="min", grid=grid, storage=f"sqlite:///{storage}", **LOUD).trials) == 2
    apart = tune(bowl, mode="max", trials=1, storage=storage, name="another", **LOUD)
    assert len(apart.trials) == 1


def test_two_searches_in_one_file_at_once_are_refused(tmp_path: Path) -> None:
    def nested(trial: Any) -> float:
        tune(bowl, mode="min", trials=1, storage=tmp_path / "study.db", **LOUD)
        return 0.0

    with pytest.raises(SettingError, match="another process is searching"):
        tune(nested, mode="min", trials=1, storage=tmp_path / "study.db", **LOUD)


def test_a_search_in_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="one of 2 processes"):
        tune(bowl, mode="min", trials=1, **LOUD)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SettingError, match=r"trainwright\[tune\]"):
        tune(bowl, mode="min", trials=1, **LOUD)


def test_an_optuna_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (optuna.trial.FrozenTrial, optuna.trial.BaseTrial):
        monkeypatch.delattr(kind, "constraints")
    with pytest.raises(SettingError, match="Optuna 5 or later"):
        tune(bowl, mode="min", trials=1, **LOUD)


def test_a_pruned_run_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    class Always(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return True

    def saving(trial: Any) -> float:
        model = nn.Linear(4, 2)
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            checkpoint=Checkpoint(tmp_path / f"trial{trial.number}"),
            observers=[Pruning(trial, "val_loss")],
            console=False,
        )
        try:
            return float(trainer.fit((x, y), (x, y), epochs=3, batch_size=16).updates)
        finally:
            ended.append((trainer.result.stopped if trainer.result else "", trainer.progress.updates))

    ended = list[tuple[str, int]]()
    found = tune(saving, mode="min", trials=2, pruner=Always(), **LOUD)
    assert [trial.ended for trial in found.trials] == ["pruned"] * 2
    assert [updates for _, updates in ended] == [3, 3]
    shutil.rmtree(tmp_path / "trial0")  # nothing is written to it any more
    assert [path.name for path in tmp_path.iterdir()] == ["trial1"]
