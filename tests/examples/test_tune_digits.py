"""`tune_digits.py` keeps its promises: pruned runs end after an epoch, a study on disk continues, limits hold."""

from __future__ import annotations

import pytest
import torch
from loading import load
from torch import nn

from trainwright import Checkpoint, NonFiniteError, Trainer, batches

optuna = pytest.importorskip("optuna", reason="needs the extra `tune`")

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()


@pytest.fixture
def example(monkeypatch):
    module = load("tune_digits")
    monkeypatch.setattr(module, "EPOCHS", 1)
    return module


def trained(trial, *observers, **settings) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.1, 0.1))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), observers=observers, console=False, **settings)
    trainer.fit(batches((x, y), 16, shuffle=True, seed=0), batches((x, y), 48), epochs=3)
    return trainer


def test_pruning_ends_a_run_after_the_epoch_and_changes_no_number_before(example, tmp_path) -> None:
    class After(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1 and len(trial.intermediate_values) == 2

    def objective(trial):
        checkpoint = Checkpoint(tmp_path / f"trial{trial.number}")
        return trained(trial, example.Pruning(trial, "val_loss"), checkpoint=checkpoint).history[-1]["val_loss"]

    study = optuna.create_study(pruner=After())
    study.optimize(objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    reports = [trial.intermediate_values for trial in study.trials]
    assert [list(one) for one in reports] == [[1, 2, 3], [1, 2], [1, 2, 3]]
    assert list(reports[1].items()) == list(reports[0].items())[:2]
    plain = trained(optuna.trial.FixedTrial({"lr": 0.1})).history
    assert [row["val_loss"] for row in plain] == list(reports[0].values())


def test_a_study_on_disk_continues_until_it_has_its_trials(example, tmp_path) -> None:
    first = example.search(tmp_path / "study.db", trials=2).trials
    again = example.search(tmp_path / "study.db", trials=3).trials
    assert [trial.params for trial in again[:2]] == [trial.params for trial in first]
    assert len(again) == 3 and again[2].params not in [trial.params for trial in first]
    assert len(example.search(tmp_path / "study.db", trials=3).trials) == 3


def test_a_model_over_the_limit_is_not_trained(example, monkeypatch) -> None:
    monkeypatch.setattr(example, "fit", lambda trainer: pytest.fail("it was trained"))
    with pytest.raises(optuna.TrialPruned, match="too many parameters"):
        example.objective(optuna.trial.FixedTrial({"width": 256, "lr": 0.1, "dropout": 0.0}))


def test_a_trial_that_diverges_is_pruned(example, monkeypatch) -> None:
    def diverges(trainer):
        raise NonFiniteError("the loss of update 3 is nan")

    monkeypatch.setattr(example, "fit", diverges)
    with pytest.raises(optuna.TrialPruned, match="the loss of update 3 is nan"):
        example.objective(optuna.trial.FixedTrial({"width": 16, "lr": 0.1, "dropout": 0.0}))


def test_a_search_in_one_of_several_processes_is_refused(example, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="of one process"):
        example.main(tmp_path / "study.db")
