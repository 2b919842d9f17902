"""Hyperparameter search on handwritten digits with Optuna: a grid search, then a Bayesian search with pruning.

Needs     pip install ".[tune]"
Data      1,797 digits of 8 x 8 pixels that come with scikit-learn: 1,000 to train, 397 to compare trials, 400 to test
Time      10 to 15 seconds on one CPU core
Expected  the best of 40 trials gets at least 97 % of the 397 digits right, and 94 % of the test digits
Writes    runs/tune_digits.db, the study

A second start, as after Ctrl-C or a crash, continues the study.
"""

import os
import sys
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import NonFiniteError, Observer, OneCycle, Trainer, accuracy, batches
from trainwright.observers import Validation

EPOCHS = 12
MOST_PARAMETERS = 12_000

pixels, targets = load_digits(return_X_y=True)
digits = torch.tensor(pixels, dtype=torch.float32) / 16
classes = torch.tensor(targets)
order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
training, judging, testing = ((digits[rows], classes[rows]) for rows in (order[:1000], order[1000:1397], order[1397:]))


class Pruning(Observer):
    """Reports a number to an Optuna trial after each epoch, and ends the run if the pruner decides so.

    The numbers of the run do not change. To end it, `on_epoch` raises `optuna.TrialPruned`, which `fit` passes on.
    """

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor

    def on_epoch(self, record: Validation) -> None:
        """Report the number of this epoch. The record of an early end (`final`) is not reported."""
        if record.final or self.monitor not in record.metrics:
            return
        value = record.metrics[self.monitor]
        self.trial.report(value, record.epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"{self.monitor} {value:.4g} after epoch {record.epoch}")


def make_trainer(width: int, lr: float, dropout: float, *observers: Observer) -> Trainer[nn.Sequential]:
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=lr),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        schedule=OneCycle(max_lr=lr),
        observers=observers,
        console=False,
    )


def fit(trainer: Trainer[nn.Sequential]) -> float:
    """Train, and return the accuracy after the last epoch on the digits that compare trials."""
    train = batches(training, 64, shuffle=True, seed=0)
    return trainer.fit(train, batches(judging, 397), epochs=EPOCHS).history[-1]["val_accuracy"]


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(trial.number)  # a separate random state for each trial, also after a restart
    width = trial.suggest_int("width", 16, 256, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    trainer = make_trainer(width, lr, dropout, Pruning(trial, "val_accuracy"))
    if sum(one.numel() for one in trainer.model.parameters()) > MOST_PARAMETERS:
        raise optuna.TrialPruned("too many parameters")  # before training
    try:
        return fit(trainer)
    except NonFiniteError as error:
        raise optuna.TrialPruned(str(error)) from error


def search(storage: Path, trials: int) -> optuna.Study:
    """Continue the study on disk until it has `trials` finished trials; return it."""
    study = optuna.create_study(
        study_name="digits",
        storage=f"sqlite:///{storage}",
        direction="maximize",  # a higher `val_accuracy` is better; the pruner reads the direction too
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=4),  # none in the first epochs: the schedule warms up
        load_if_exists=True,
    )
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    study.sampler = optuna.samplers.TPESampler(seed=len(finished))  # another seed after a restart: no trial is repeated
    study.optimize(objective, n_trials=max(0, trials - len(finished)))
    return study


def main(storage: Path) -> None:
    if "WORLD_SIZE" in os.environ:
        sys.exit("a search is of one process: each of several would search for itself. Run python tune_digits.py")
    torch.set_num_threads(1)  # a network this small gains nothing from more
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage.parent.mkdir(parents=True, exist_ok=True)

    grid: dict[str, list[float]] = {"width": [32, 64], "lr": [1e-3, 1e-2], "dropout": [0.1]}
    every = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(grid, seed=0))
    every.optimize(objective)
    print(f"The best of a grid of {len(every.trials)} trials: {every.best_value:.1%} with {every.best_params}")

    search(storage, trials=12)  # the search ends after a few trials
    study = search(storage, trials=40)  # it continues in the next call, or in the next run
    states = [trial.state.name.lower() for trial in study.trials]
    print(f"Bayesian search: {', '.join(f'{states.count(one)} {one}' for one in dict.fromkeys(states))}")
    if "complete" in states:
        print(f"The best: {study.best_value:.1%} with {study.best_params}")
        torch.manual_seed(0)
        best = make_trainer(**study.best_params)
        fit(best)
        right = best.evaluate(batches(testing, 400), name="test")["test_accuracy"]
        print(f"\n{right:.1%} of the test digits are right")


if __name__ == "__main__":
    main(Path("runs/tune_digits.db"))
