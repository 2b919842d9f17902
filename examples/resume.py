"""A killed and resumed run ends with the same bits as an uninterrupted run.

    python examples/resume.py

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn
Time      about 10 seconds on one CPU core, most of them to import torch three times
Expected  the killed run continues inside an epoch, and all weights of both runs are equal, bit for bit
Writes    runs/resume/killed and runs/resume/whole, anew each time

The script starts itself three times: to the end, until a SIGKILL in the middle of the third epoch, and to continue.
The network has dropout and BatchNorm, and the data are shuffled. A resume has to restore the state of all of these.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Checkpoint, OneCycle, Trainer, Updates, accuracy, batches, load_weights

RUNS = Path("runs/resume")


class Killed(Trainer[nn.Sequential]):
    """Kills its own process, as a power cut would, when it has made so many updates."""

    def after_update(self) -> None:
        if self.progress.updates == int(os.environ.get("KILL_AFTER", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: Path) -> None:
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    trainer = Killed(
        model,
        torch.optim.AdamW(model.parameters()),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        schedule=OneCycle(max_lr=1e-2),
        checkpoint=Checkpoint(directory, every=Updates(10)),
    )
    train_data, val = batches((x[:1400], y[:1400]), 32, shuffle=True, seed=0), batches((x[1400:], y[1400:]), 397)
    trainer.fit(train_data, val, epochs=5, resume="auto")


def start(directory: Path, *, kill_after: int = 0) -> int:
    """Run `train` in a process of its own; return its exit code."""
    environment = {**os.environ, "KILL_AFTER": str(kill_after)}
    return subprocess.run([sys.executable, __file__, str(directory)], env=environment, check=False).returncode


def main() -> None:
    shutil.rmtree(RUNS, ignore_errors=True)
    print("--- a run that is never killed", flush=True)
    start(RUNS / "whole")
    print("\n--- a run that is killed after 115 updates", flush=True)
    code = start(RUNS / "killed", kill_after=115)
    print(f"exit code {code}: killed by signal {-code}")
    print("\n--- the same command again", flush=True)
    start(RUNS / "killed")

    whole, killed = (load_weights(RUNS / name, which="last") for name in ("whole", "killed"))
    equal = whole.keys() == killed.keys() and all(torch.equal(whole[name], killed[name]) for name in whole)
    print(f"\nall {len(whole)} tensors of both runs are {'equal, bit for bit' if equal else 'NOT equal'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    else:
        main()
