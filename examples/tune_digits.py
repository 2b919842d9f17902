"""Search for settings on handwritten digits: a grid, then Bayesian search with pruning, a limit and a study on disk.

Needs     pip install "trainwright[tune]"
Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 to judge settings by, 400 to judge the best by
Time      10 to 15 seconds on one CPU core (--smoke: few trials of two epochs, less)
Expected  the best of 40 trials gets at least 97 % of the judging digits right, and 94 % of those to test by
Writes    runs/tune_digits.db, the study: start again after Ctrl-C or a crash, and it goes on (--smoke: nothing stays)
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from optuna.pruners import MedianPruner
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Observer, OneCycle, Pruning, Trainer, accuracy, batches, constrain, tune

SMOKE = "--smoke" in sys.argv
EPOCHS = 2 if SMOKE else 12
MOST_PARAMETERS = 12_000

pixels, targets = load_digits(return_X_y=True)
digits = torch.tensor(pixels, dtype=torch.float32) / 16
classes = torch.tensor(targets)
order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
training, judging, testing = ((digits[rows], classes[rows]) for rows in (order[:1000], order[1000:1397], order[1397:]))


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
    """Train, and return the share of the judging digits that are right at the end."""
    train = batches(training, 64, shuffle=True, seed=0)
    return trainer.fit(train, batches(judging, 397), epochs=EPOCHS).history[-1]["val_accuracy"]


def objective(trial: Any) -> float:
    width = trial.suggest_int("width", 16, 256, log=True)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    trainer = make_trainer(width, lr, dropout, Pruning(trial, "val_accuracy"))
    constrain(trial, "parameters", sum(one.numel() for one in trainer.model.parameters()), at_most=MOST_PARAMETERS)
    return fit(trainer)


def main(storage: Path) -> None:
    torch.set_num_threads(1)  # a network this small gains nothing from more

    print("A grid: every combination.")
    tune(
        objective,
        mode="max",
        grid={"width": [32, 64, 128], "lr": [1e-3, 1e-2], "dropout": [0.1]},
        trials=2 if SMOKE else None,
        seed=0,
    )

    print("\nBayesian search, stopped after a few trials.")
    pruner = MedianPruner(n_warmup_steps=4)  # the schedule warms up: the first epochs say little
    tune(objective, mode="max", trials=2 if SMOKE else 12, pruner=pruner, storage=storage, seed=0)
    print("\nThe same study, which goes on where it was.")
    found = tune(objective, mode="max", trials=4 if SMOKE else 40, pruner=pruner, storage=storage, seed=0)

    print("\nThe best first:", *str(found).splitlines()[:6], sep="\n")
    if found.best is not None:
        torch.manual_seed(0)
        best = make_trainer(**found.best.settings)
        fit(best)
        right = best.evaluate(batches(testing, 400), name="test")["test_accuracy"]
        print(f"\n{right:.1%} of the test digits are right")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch if SMOKE else "runs") / "tune_digits.db")
