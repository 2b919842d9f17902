"""A training under torchrun that does to itself what is planned: `killed_training.py DIRECTORY PLAN`, both as JSON.

The plan is a list of `{"attempt": n, "rank": r, "do": ..., "at": ..., "number": k, "delay": seconds}`: `do` is "kill",
"raise" or "slow"; `at` is "backward", "update", "validation", "save" or "time", and `number`
counts these from 0 in that process and attempt. Each process writes what it did to files of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright import DDP, Checkpoint, Cosine, Observer, Trainer, Updates, batches

EPOCHS, ROWS, SIZE = 5, 44, 4
ATTEMPT, RANK = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("RANK", "0"))


class Noisy(Dataset):
    """Rows that draw from torch, Python and NumPy when they are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, 12, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.x[row] + 0.1 * torch.randn(12, dtype=torch.float64) + noise, self.y[row]


class Planned:
    """What is to happen to this process in this attempt, and what has."""

    def __init__(self, directory: Path, plan: list[dict[str, Any]]) -> None:
        mine = [one for one in plan if (one["attempt"], one["rank"]) == (ATTEMPT, RANK)]
        self.one: dict[str, Any] = mine[0] if mine else {"do": "", "at": "", "number": -1}
        self.seen: dict[str, int] = {}
        self.directory, self.process = directory, os.getpid()
        self._file = os.open(directory / f"reported-{RANK}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        if self.one["at"] == "save":
            sys.addaudithook(self._audit)
        if self.one["at"] == "time":
            threading.Thread(target=self._wait, daemon=True).start()

    def tell(self, what: str, **more: Any) -> None:
        """Write a line down that stays, whoever is killed."""
        line = {"what": what, "attempt": ATTEMPT, "time": time.time(), **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def happen(self, what: str) -> None:
        """Count an event, and do what is planned at it."""
        number = self.seen[what] = self.seen.get(what, -1) + 1
        if what == self.one["at"] and number == self.one["number"]:
            self.tell("planned", **{"do": self.one["do"], "at": what})
            DEEDS[self.one["do"]]()

    def _wait(self) -> None:
        time.sleep(self.one["delay"])
        self.tell("planned", do="kill", at="time")
        kill()

    def _audit(self, event: str, arguments: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(self.directory / "run") in str(arguments[0]):
            self.happen("save")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("bad row 17")


def slow() -> None:
    time.sleep(2.0)


DEEDS = {"kill": kill, "raise": fail, "slow": slow}


class Own(Trainer[nn.Module]):
    """Tells where it is."""

    planned: Planned

    def training_step(self, batch: Any) -> Any:
        loss: Tensor = super().training_step(batch)
        if loss.requires_grad:
            loss.register_hook(lambda _: self.planned.happen("backward"))
        return loss

    def validation_step(self, batch: Any) -> Any:
        self.planned.happen("validation")
        return super().validation_step(batch)

    def after_update(self) -> None:
        if "update" not in self.planned.seen:
            self.planned.tell("begins", update=self.progress.updates)
        self.planned.happen("update")


class Tell(Observer):
    """Tells of each checkpoint that is whole."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned

    def on_save(self, saved: Any) -> None:
        self.planned.tell("saved", update=saved.update)


def main(directory: Path, plan: list[dict[str, Any]]) -> None:
    """Train, going on from the newest checkpoint; write down the weights that it ends with."""
    torch.set_num_threads(1)
    random.seed(2)
    np.random.seed(3)
    torch.manual_seed(1)
    planned = Planned(directory, plan)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1)).double()
    trainer = Own(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        nn.MSELoss(),
        schedule=Cosine(),
        checkpoint=Checkpoint(directory / "run", best="val_loss", every=Updates(2)),
        parallel=DDP(timeout=60.0),
        observers=[Tell(planned)],
        console=False,
    )
    trainer.planned = planned
    data = Noisy()
    planned.tell("started", pid=os.getpid())
    try:
        result = trainer.fit(
            batches(data, SIZE, shuffle=True, seed=0),
            batches((data.x[:12], data.y[:12]), 4),
            epochs=EPOCHS,
            validate=Updates(3),
            resume="auto",
        )
    except SystemExit as ended:
        planned.tell("stopped", update=trainer.progress.updates, code=ended.code)
        raise
    weights = [value.double().reshape(-1).tolist() for value in model.state_dict().values()]
    outcome = {"weights": weights, "history": result.history, "torch": torch.get_rng_state().tolist()}
    (directory / f"outcome-{RANK}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    where, plan = sys.argv[1:]
    main(Path(where), json.loads(plan))
