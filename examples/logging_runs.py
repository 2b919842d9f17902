"""Log a run as a table and as JSON lines, and to TensorBoard, Weights & Biases or MLflow if they are installed.

    python examples/logging_runs.py [--tensorboard] [--wandb] [--mlflow]

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      1 to 2 seconds of training on one CPU core, without the loggers of other packages
Expected  at least 90 % of the held-out digits right; eight validations in the table
Writes    runs/logged: numbers.csv, journal.jsonl, and what the loggers write; MLflow keeps pictures in mlruns

A logger is an observer: it receives plain numbers and cannot change the run. A failing logger warns once, and the run
continues. Weights & Biases is offline here; without WANDB_MODE it sends the numbers to its server.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Journal, Observer, OneCycle, TensorBoardLogger, Trainer, Updates, accuracy, batches
from trainwright.observers import CSVLogger, MLflowLogger, WandbLogger

RUN = Path("runs/logged")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("tensorboard", "wandb", "mlflow"):
        parser.add_argument(f"--{name}", action="store_true", help=f'needs pip install ".[{name}]"')
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(0)

    loggers: list[Observer] = [CSVLogger(RUN / "numbers.csv"), Journal(RUN / "journal.jsonl", updates=Updates(20))]
    if asked.tensorboard:
        loggers.append(TensorBoardLogger(RUN / "tensorboard"))
    if asked.wandb:
        os.environ.setdefault("WANDB_MODE", "offline")
        loggers.append(WandbLogger(project="digits", directory=RUN))
    if asked.mlflow:
        loggers.append(MLflowLogger(experiment="digits", tracking_uri=f"sqlite:///{RUN}/mlflow.db"))

    pixels, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets)
    train, val = batches((x[:1400], y[:1400]), 32, shuffle=True, seed=0), batches((x[1400:], y[1400:]), 397)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        schedule=OneCycle(max_lr=1e-2),
        observers=loggers,
    )
    trainer.fit(train, val, epochs=8)
    with open(RUN / "numbers.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val_accuracy")]
    print(f"{len(rows)} validations in the table; columns {', '.join(rows[0])}")
    print(f"{float(rows[-1]['val_accuracy']):.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
