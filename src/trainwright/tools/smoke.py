"""Runs a few updates of everything a long run will do, so that its mistakes show now; nothing is left of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from trainwright.checkpointing.parts import check_savable, gather
from trainwright.core.checks import check_whole
from trainwright.core.durations import Updates
from trainwright.core.errors import SettingError
from trainwright.core.records import Update
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.data.sources import takes_batch_size
from trainwright.observers.probes import Probe
from trainwright.observers.table import duration, number
from trainwright.protocols import Observer
from trainwright.tools.trial import check_trainer, open_afresh, ready, traceless, variant
from trainwright.trainer import Trainer

_BY_LENGTH = ("schedule", "average")
"""Parts that may need a longer run than a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastRun:
    """What was run, and what it gave; `print` shows it."""

    updates: int
    """Updates that were applied."""
    skipped: int
    """Updates that were held back."""
    losses: tuple[float, ...]
    """The loss of each update."""
    numbers: Mapping[str, float]
    """The last row: training's means, and those of the validation batches."""
    ran: tuple[str, ...]
    """What was run, in a line each."""
    left_out: tuple[str, ...]
    """What was not run, and why."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        numbers = " · ".join(f"{name} {number(value)}" for name, value in self.numbers.items())
        lines = [f"fast run: {self.updates} updates in {duration(self.seconds)}, nothing was changed", f"  {numbers}"]
        lines += [f"  ran       {line}" for line in self.ran] + [f"  not run   {line}" for line in self.left_out]
        return "\n".join(lines)


@suggests
def smoke_run(
    trainer: Trainer[Any], train: Any, val: Any = None, *, updates: int = 3, batch_size: int | None = None
) -> FastRun:
    """Run `updates` updates, two batches of each validation set, all hooks between, and the checkpoint up to its file.

    Errors come out as from `fit`. Afterwards everything is as it was: weights, optimizers, counters, random states;
    what hooks of your own write to files or elsewhere is theirs. Observers are not told. SettingError in a group of
    several processes; DataError for a stream that cannot be read afresh, with the cure.
    """
    check_trainer(trainer, "smoke_run")
    check_whole(updates, f"smoke_run(updates={updates!r})")
    with traceless(trainer) as before:
        found = ready(trainer, train, updates=updates, batch_size=batch_size)
        held_out = None if val is None else _held_out(val, batch_size)
        parts = {name: getattr(trainer, name) for name in _BY_LENGTH if getattr(trainer, name) is not None}
        try:
            return _run(trainer, found, held_out, updates=updates, parts=parts)
        except SettingError as error:
            before.restore()
            if not parts:
                raise
            told = _run(trainer, found, held_out, updates=updates, parts={})  # raises again what is not theirs
            why = f"{', '.join(parts)}, in so short a run: {str(error).splitlines()[0]}"
            return replace(told, left_out=(why, *told.left_out))


class _Losses(Observer):
    """Keeps the loss of each update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_update(self, update: Update) -> None:
        self.seen.append(update.loss)


def _run(trainer: Trainer[Any], found: list[Any], held_out: Any, *, updates: int, parts: Mapping[str, Any]) -> FastRun:
    losses, saved = _Losses(), list[str]()

    def save(twin: Trainer[Any]) -> None:
        parts = twin.parts()
        check_savable(gather(parts), twin.metrics)
        saved.extend(parts)

    observers = [losses, *([] if trainer.checkpoint is None else [Probe(save, every=Updates(updates))])]
    early = trainer.early_stopping
    if early is not None and (held_out is not None or not early.monitor.startswith("val_")):
        parts = {**parts, "early_stopping": early}
    twin = variant(trainer, metrics=trainer.metrics, observers=observers, **parts)
    begun = time.perf_counter()
    result = twin.fit(found, held_out, max_updates=updates)
    seconds = time.perf_counter() - begun
    return FastRun(
        updates=result.updates,
        skipped=result.skipped,
        losses=tuple(losses.seen),
        numbers={name: value for name, value in result.history[-1].items() if name not in ("epoch", "update")},
        ran=_ran(trainer, twin, held_out, parts=parts, saved=saved),
        left_out=_left_out(trainer, held_out),
        seconds=seconds,
    )


def _held_out(val: Any, batch_size: int | None) -> Any:
    """Two batches of each validation set."""
    if isinstance(val, Mapping) and not all(hasattr(one, "shape") for one in val.values()):
        return {name: _held_out(one, batch_size) for name, one in val.items()}
    with rng_preserved():
        source = open_afresh(val, batch_size=batch_size if takes_batch_size(val) else None, role="val")
        with rng_preserved(source.generators):
            return list(islice(source.epoch(0), 2))


def _ran(
    trainer: Trainer[Any], twin: Trainer[Any], held_out: Any, *, parts: Mapping[str, Any], saved: list[str]
) -> tuple[str, ...]:
    k = trainer.accumulate[0][1]
    lines = [f"training, {k} micro-batch{'es' if k > 1 else ''} per update, on {trainer.device}"]
    lines += [f"precision {trainer.precision}"] if trainer.precision is not None else []
    lines += [name.replace("_", " ") for name in parts]
    lines += [f"metrics {', '.join(trainer.metrics)}"] if trainer.metrics else []
    if held_out is not None:
        lines.append(f"validation of {len(held_out)} {'sets' if isinstance(held_out, dict) else 'batches'}")
    lines += [f"the checkpoint up to its file: {', '.join(saved)}"] if saved else []
    hooks = [name for name in ("begin_epoch", "end_epoch", "after_update") if getattr(twin._hooks, name) is not None]
    return (*lines, *([f"hooks {', '.join(hooks)}"] if hooks else []))


def _left_out(trainer: Trainer[Any], held_out: Any) -> tuple[str, ...]:
    lines = ["validation: smoke_run(trainer, train, val) runs it"] if held_out is None else []
    lines += ["saving: there is no checkpoint slot"] if trainer.checkpoint is None else []
    early = trainer.early_stopping
    if early is not None and held_out is None and early.monitor.startswith("val_"):
        lines.append(f"early stopping: it watches {early.monitor}")
    watching = [type(one).__name__ for one in trainer.observers if type(one).__module__.split(".")[0] != "trainwright"]
    return (*lines, *([f"observers {', '.join(watching)}"] if watching else []))
