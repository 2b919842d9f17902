"""One run of the law Resume: built from a cell, traced update by update, interrupted at a given place, or resumed."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from multiprocessing import RawValue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from laws.models import CNN, MLP, tensors
from laws.resume_cells import Cell, drawn, uninterrupted
from laws.resume_data import data
from trainwright import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Epochs,
    Journal,
    MixedPrecision,
    Observer,
    OneCycle,
    Plateau,
    StepLR,
    Trainer,
    Updates,
    accuracy,
    batches,
    latest_checkpoint,
)
from trainwright.checkpointing.format import load_tree
from trainwright.core.errors import CheckpointError

EPOCHS = 3
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ENDS_ITSELF = ("signal in an update", "signal while waiting", "error")
"""The interrupts at which a run saves before it ends."""
BACKGROUND = "async_save" in inspect.signature(Checkpoint).parameters
ERROR = 3
"""The exit code of a run that ended in the error that was planned for it."""


@dataclass(frozen=True)
class Interrupt:
    """How and where a run ends: in micro-batch `micro` of the try after `tries` updates, applied or skipped."""

    kind: str
    tries: int = 0
    micro: int = 0
    batch: int = 0
    """For a signal while waiting: the micro-batch of the run, from 0, that is waited for."""
    saved: str = ""
    """For a kill: the checkpoint that must be whole before."""
    skipped: int = 0
    """For a kill: the updates skipped before that checkpoint, which may replace an older one of its name."""
    signal: int = signal.SIGTERM
    event: int = -1
    """For a kill at any event: its number."""


class PlannedError(Exception):
    """What is raised out of a step."""


def train(cell: Cell, directory: Path, *, interrupt: Interrupt | None = None, resume: str | None = None) -> None:
    """Run the cell in `directory`, writing `trace.jsonl` as it goes and `outcome.json` at its end."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    watch = Watch(directory, interrupt)
    torch.manual_seed(11)
    model = Watched(cell["model"], watch)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    trainer = built(cell, model, directory, watch)
    watch.trainer = trainer
    held_out = batches(tensors(cell["model"], 20, seed=6), 8)
    loader = data(cell, watch)
    try:
        result = trainer.fit(
            loader, held_out, epochs=EPOCHS, validate=Updates(4 if cell["accumulate"] == 1 else 2), resume=resume
        )
    except PlannedError:
        sys.exit(ERROR)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    reported = {name: value for name, value in asdict(result).items() if name not in ("seconds", "blocked")}
    reported["best"]["path"] = reported["best"]["path"].name
    outcome = {
        "random state": random_digests(),
        "result": reported,
        "model": dict(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "optimizer": trainer.optimizer.state_dict(),
        "state": trainer.state,
        "checkpoint": load_tree(latest_checkpoint(directory / "checkpoints")),
    }
    flat = {"events": watch.event, **flattened(outcome)}
    (directory / "outcome.json").write_text(json.dumps(flat))


def built(cell: Cell, model: nn.Module, directory: Path, watch: Watch) -> Trainer:
    """The cell's trainer."""
    slots: dict[str, Any] = {}
    if watch.interrupt is not None and watch.interrupt.kind == "error":
        slots["on_error"] = "save"
    saving: dict[str, Any] = {}
    if watch.interrupt is not None and watch.interrupt.kind == "none" and BACKGROUND:
        saving["async_save"] = False
    often = Updates(1 if cell["accumulate"] > 1 else 1 + drawn(uninterrupted(cell), "every", 3))
    every: Any = {"epoch boundary": Epochs(1), "after validation": "auto", "mid-epoch": often}[cell["place"]]
    if watch.interrupt is not None and watch.interrupt.kind in ENDS_ITSELF:
        every = Epochs(99)  # so that what is saved at the end is what the run goes on from
    schedule = {
        "OneCycle": OneCycle(0.03),
        "StepLR": StepLR(Updates(2), gamma=0.8),
        "Plateau": Plateau("val_loss", patience=0, factor=0.5),
    }
    precision = {"fp32": None, "bf16": "bf16", "fp16": MixedPrecision("fp16", init_scale=2.0**19, growth_interval=3)}
    return Own(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        accumulate=cell["accumulate"],
        clip=1.0,
        schedule=schedule[cell["schedule"]],
        precision=precision[cell["precision"]],
        average=EMA(0.8) if cell["average"] == "EMA" else None,
        early_stopping=EarlyStopping("val_loss", patience=30),
        checkpoint=Checkpoint(
            directory / "checkpoints", best="val_accuracy", mode="max", every=every, keep=99, **saving
        ),
        observers=[watch, Journal(directory / "journal.jsonl")],
        console=False,
        **slots,
    )


class Own(Trainer):
    """Keeps a number and a tensor of its own in `state`."""

    def after_update(self):
        self.state["applied"] = self.state.get("applied", 0) + 1
        self.state["drift"] = 0.5 * self.state.get("drift", 0.0) + next(self.model.parameters()).detach().sum()


class Watched(nn.Module):
    """A model that shows what it is trained on, and draws from every generator, in evaluations too."""

    def __init__(self, kind: str, watch: Watch) -> None:
        super().__init__()
        self.net = {"mlp": MLP, "cnn": CNN}[kind]()
        self.watch = watch

    def forward(self, x):
        if self.training:
            self.watch.saw(x)
        output = self.net(x * (1 + 0.01 * (random.random() + np.random.rand() + float(torch.rand(())))))
        if self.training and self.watch.fails:
            raise PlannedError
        return output


# What is written down.


class Watch(Observer):
    """Writes what each update saw and did, at once, so that it is there when the process is killed; interrupts it."""

    wants = frozenset({"grad_norm"})

    def __init__(self, directory: Path, interrupt: Interrupt | None) -> None:
        self.interrupt, self.directory = interrupt, directory
        self.trainer: Any = None
        self.rows: list[str] = []
        self.event = 0
        self.fails = False
        """Whether the step in hand is to raise, once it has moved random states and buffers."""
        self.validated = -1
        """The tries at the last validation."""
        self.seen = RawValue("q", 0)
        """Micro-batches that this process has trained on; workers read it."""
        self._process = os.getpid()
        self._file = os.open(directory / "trace.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        if interrupt is not None and interrupt.event >= 0:
            sys.addaudithook(self._audit)

    @property
    def tries(self) -> int:
        """Updates so far, applied or skipped."""
        return self.trainer.progress.updates + self.trainer.progress.skipped

    def saw(self, x: torch.Tensor) -> None:
        """Note a micro-batch; end the run here if that is the plan."""
        self.rows.append(digest(x))
        self.seen.value += 1
        self._happen()
        plan = self.interrupt
        if plan is None or plan.event >= 0 or plan.kind == "none":
            return
        if (self.tries, len(self.rows) - 1) != (plan.tries, plan.micro):
            return
        if plan.kind == "kill":
            self._wait_for(plan)
            os.kill(self._process, signal.SIGKILL)
        elif plan.kind == "signal in an update":
            os.kill(self._process, plan.signal)
        elif plan.kind == "error":
            self.fails = True

    def _wait_for(self, plan: Interrupt) -> None:
        """Let the checkpoint become whole that is written beside the training."""
        deadline, path = time.monotonic() + 20, self.directory / "checkpoints" / plan.saved
        while not _holds(path, skipped=plan.skipped):
            assert time.monotonic() < deadline, f"{plan} was never saved"
            time.sleep(0.001)

    def on_update(self, update):
        model = self.trainer.model.state_dict()
        self._write("update", {**asdict(update), "rows seen": self.rows, "model": digest(*model.values())})
        self.rows = []
        self._happen()

    def on_validate(self, record):
        self.validated = self.tries
        self._write("validate", _timeless(record))
        self._happen()

    def on_epoch(self, record):
        self._write("epoch", _timeless(record))
        self._happen()

    def on_save(self, saved):
        """Note where the run stands: right at the boundary that was saved, where saving is not left to a thread."""
        at = self.trainer.progress
        place = "epoch boundary" if at.batch == 0 else "mid-epoch"
        if self.validated == self.tries and at.batch:
            place = "after validation"
        line = {"name": saved.path.name, "tries": self.tries, "skipped": at.skipped, "place": place}
        with (self.directory / "saves.jsonl").open("a") as file:
            file.write(json.dumps({**line, "epoch": at.epoch, "batch": at.batch}) + "\n")
        self._happen()

    def _write(self, event: str, record: dict[str, Any]) -> None:
        line = {"event": event, "tries": self.tries, **record, "random": digest(*random_digests().values())}
        os.write(self._file, (json.dumps(flattened(line)) + "\n").encode())

    def _audit(self, event: str, arguments: Any) -> None:
        if event in _FILE_EVENTS and str(self.directory) in str(arguments[0]):
            self._happen()

    def _happen(self) -> None:
        """Count an event of this process; die at the one that is planned."""
        if os.getpid() != self._process:
            return
        plan = self.interrupt
        if plan is not None and plan.event == self.event:
            os.kill(self._process, signal.SIGKILL)
        self.event += 1


_FILE_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.truncate"})


def _timeless(record: Any) -> dict[str, Any]:
    """A record without what a session measures: its seconds, and the rows in them."""
    return {name: value for name, value in asdict(record).items() if name not in ("seconds", "waiting", "rows")}


def random_digests() -> dict[str, str]:
    """The state of every generator of the process."""
    return {
        "python": digest(repr(random.getstate())),
        "numpy": digest(*np.random.get_state()),
        "torch": digest(torch.get_rng_state()),
    }


def digest(*values: Any) -> str:
    """The bits of tensors and other plain things in a word."""
    found = hashlib.sha1()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            found.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:12]


def flattened(tree: Any, where: str = "") -> dict[str, Any]:
    """A tree as `{path: plain value}`, exact to the last bit; wall-clock seconds are left out."""
    if isinstance(tree, dict):
        parts = [flattened(value, f"{where}.{key}" if where else str(key)) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and len(tree) < 100:
        parts = [flattened(value, f"{where}[{index}]") for index, value in enumerate(tree)]
    elif where.endswith("seconds"):
        return {}
    elif isinstance(tree, float):
        return {where: tree.hex()}
    elif tree is None or isinstance(tree, bool | int | str):
        return {where: tree}
    else:
        return {where: digest(tree)}
    return {where: f"{type(tree).__name__} of {len(tree)}"} | {k: v for part in parts for k, v in part.items()}


def _holds(path, *, skipped):
    """Whether a checkpoint is whole of a state with so many updates held back; one of the same name may replace it."""
    try:
        return path.exists() and load_tree(path)["progress"]["counters"]["skipped"] >= skipped
    except CheckpointError:
        return False


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    train(given["cell"], Path(given["directory"]), resume=given["resume"])
