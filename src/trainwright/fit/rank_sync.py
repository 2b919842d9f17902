"""Keeps ranks consistent: compares their configuration at the start, exchanges their requests between updates."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

from torch import nn

from trainwright.core.errors import SettingError
from trainwright.core.signals import ENDING
from trainwright.data.source import Source
from trainwright.fit.plan import Ends, settings_of
from trainwright.observers.probes import Probe, RunObserver
from trainwright.update.trainer_like import TrainerLike

EXCHANGE_INTERVAL = 1.0
"""Approximate time between two exchanges of requests."""
MAX_GROWTH = 4
"""The largest growth of the number of updates between two exchanges: the speed may change."""
_DEVICE = re.compile(r"\b([a-z]+):\d+\b")
_DATA_NAMES = ("training data", "validation data")


def check_same_config(
    trainer: TrainerLike, source: Source, val: Mapping[str, Source], *, ends: Ends, resumes: bool
) -> None:
    """Raise SettingError on every rank if model, data, ends or settings differ between ranks.

    Compares lengths, rows, batch sizes, settings as text, and shapes. Reads no row.
    """
    given = {
        **_settings(trainer),
        "model": _layout(trainer.model),
        "training data": _sizes(source),
        "validation data": ", ".join(f"{name}: {_sizes(data)}" for name, data in val.items()) or "none",
        "ends": _ends(ends),
        "probes": _probes(trainer),
        "resume": "a resume" if resumes else "none",
    }
    first, *others = trainer.world.all_gather(given)
    for rank, other in enumerate(others, start=1):
        for name in first:
            if first[name] != other[name]:
                raise _difference(name, first[name], other[name], rank=rank)


def _difference(name: str, first: str, other: str, *, rank: int) -> SettingError:
    apart = "Trainer(..., parallel=None) for runs apart"
    same = "one script that does the same on every process"
    own = "sharded(data) for data that are each process's own part"
    if name == "probes":
        same = "observers=[Probe(...)] on every process, and `if trainer.is_main` in its function"
    return SettingError(
        f"the processes of this run were not given the same {name}",
        have=f"rank 0: {first}; rank {rank}: {other}",
        want="the same on every process, which runs its own rows of every batch",
        fix=f"{own if name in _DATA_NAMES else same}, or {apart}",
    )


def _ends(ends: Ends) -> str:
    values = {field.name: getattr(ends, field.name) for field in fields(ends)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _settings(trainer: TrainerLike) -> dict[str, str]:
    texts = {name: _DEVICE.sub(r"\1", text) for name, text in settings_of(trainer).items()}
    texts["metrics"] = ", ".join(trainer.metrics or ()) or "none"
    texts["checkpoint"] = "none" if trainer.checkpoint is None else type(trainer.checkpoint).__name__
    return texts


def _probes(trainer: TrainerLike) -> str:
    """Return the observers that pause all ranks, as text: a probe may run a collective forward."""
    each = [observer for observer in trainer.observers if isinstance(observer, RunObserver) and observer.name]
    names = [
        f"{observer.name} every {observer.duration}" if isinstance(observer, Probe) else observer.name
        for observer in each
    ]
    return ", ".join(names) or "none"


def _sizes(source: Source) -> str:
    """Return the size of data as text. The shards of a stream may differ: it has no size."""
    if source.length is None:
        return "batches without a length"
    known = {"batches": source.length, "rows": source.rows, "rows in a batch": source.batch_size}
    return ", ".join(f"{n} {name}" for name, n in known.items() if n is not None)


def _layout(model: nn.Module) -> str:
    """Return a short text that differs if names, shapes or dtypes of weights differ."""
    weights = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in weights]
    numbers = sum(tensor.numel() for _, tensor in weights)
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return f"{type(model).__qualname__} of {numbers:,} numbers in {len(weights)} tensors ({digest})"


class Requests(NamedTuple):
    """The combined requests of all ranks."""

    stop: str
    """The reason of a rank that stops; empty if none does."""
    signal: int
    """The number of a signal that a rank has received; 0 if none has."""
    save: bool
    """Whether a rank requests a checkpoint."""
    seconds: float
    """Seconds of the stage, by the clock of rank 0."""


class RankSync:
    """Exchanges the requests of all ranks about once a second, after the same update on each rank.

    Nothing is sent between two exchanges. Rank 0 chooses the update of the next exchange by its clock.
    """

    def __init__(self, trainer: TrainerLike) -> None:
        self._world, self._counters = trainer.world, trainer._counters
        self.stop_reason = ""
        """The reason for which this rank stops, until the next exchange."""
        self.at = 0.0
        """Number of applied updates at the next exchange."""
        self._stretch = 1
        self._last = (0, time.perf_counter())

    def start(self) -> None:
        """Start after loading: the first exchange comes after the next update."""
        self._last, self._stretch = (self._counters.updates, time.perf_counter()), 1
        self.at = self._counters.updates + 1

    def join(self, *, signal: int = 0, save: bool = False) -> Requests:
        """Exchange the requests, and set the update of the next exchange. A collective.

        Costs one all-reduce of a few numbers, and an all-gather of the reasons if a rank stops.
        """
        main = self._world.is_main
        signals = [float(signal == number) for number in ENDING]
        clock = (self._counters.seconds, float(self._next())) if main else (0.0, 0.0)
        stops, saves, seconds, self.at, *given = self._world.sum_numbers(
            float(self.stop_reason != ""), save, *clock, *signals
        )
        stop = next((reason for reason in self._world.all_gather(self.stop_reason) if reason), "") if stops else ""
        self.stop_reason = ""
        number = next((number for number, times in zip(ENDING, given, strict=True) if times), 0)
        return Requests(stop=stop, signal=number, save=bool(saves), seconds=seconds)

    def _next(self) -> int:
        """Return the update about `EXCHANGE_INTERVAL` from now, by the speed since the last exchange."""
        updates, now = self._counters.updates, time.perf_counter()
        before, then = self._last
        made, took = updates - before, max(now - then, 1e-6)
        if made:
            pace = int(EXCHANGE_INTERVAL * made / took)
            self._stretch = max(1, min(pace, MAX_GROWTH * self._stretch))
            self._last = (updates, now)
        return updates + self._stretch
