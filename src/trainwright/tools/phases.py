"""Where the time of an update goes: data, transfer, forward, loss, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainwright.data.source import Source
from trainwright.tools.findings import Finding
from trainwright.tools.measuring import Clock, synchronise
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import variant
from trainwright.trainer import Trainer
from trainwright.update.hooks import free_transfer_memory

NAMES = ("data", "transfer", "forward", "loss", "backward", "update", "rest")
MUCH = 0.2
"""Share of the time spent waiting for data from which on the loader is a finding."""
_READINGS = {
    "data": "waiting for data: workers, batches in memory, or less work for each row",
    "transfer": "moving batches: pinned memory, smaller types (uint8 images), data on the device",
    "forward": "in the model's forward pass: bf16, compile, channels-last, a smaller model",
    "loss": "in the loss and the step around the model",
    "backward": "in the backward pass: bf16, compile, fewer trained layers",
    "update": "in the optimizer's step: a fused optimizer, larger batches or accumulate",
    "rest": "between the steps: larger batches make fewer updates",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of one update by phase, on average over `updates` of them."""

    data: float
    """Waiting for the next micro-batch."""
    transfer: float
    """Moving it to the device."""
    forward: float
    """The model."""
    loss: float
    """What else the step does."""
    backward: float
    """All gradients."""
    update: float
    """Clip, check and the optimizer's step."""
    rest: float
    """The loop, numbers, an average, hooks."""
    updates: int

    @property
    def total(self) -> float:
        """Seconds of an update."""
        return float(sum(getattr(self, name) for name in NAMES))

    @property
    def shares(self) -> dict[str, float]:
        """The share of each phase, 0 to 1, in their order."""
        return {name: getattr(self, name) / self.total for name in NAMES}

    @property
    def reading(self) -> str:
        """What the largest phase means, and what may make it shorter."""
        name, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{share:.0%} {_READINGS[name]}"

    @property
    def finding(self) -> Finding | None:
        """The loader, where the run waits for it a good part of the time; else None."""
        share = self.shares["data"]
        if share < MUCH:
            return None
        return Finding(
            "slow loader",
            f"{share:.0%} of an update is spent waiting for data, {1000 * self.data:.3g} ms of it",
            "the model stands still meanwhile",
            "DataLoader(..., num_workers=2), or batches(data_set, 64, in_memory=True) where the rows fit",
        )

    def bar(self, width: int = 60) -> str:
        """The shares as a line of `width` characters and a line that says what they are."""
        shares, marks = self.shares, "█▓▒░#+·"
        ends = [round(width * sum(list(shares.values())[: i + 1])) for i in range(len(NAMES))]
        drawn = "".join(mark * (end - begin) for mark, begin, end in zip(marks, [0, *ends], ends, strict=False))
        told = "  ".join(
            f"{mark} {name} {shares[name]:.0%}"
            for mark, name in zip(marks, NAMES, strict=True)
            if shares[name] >= 0.005
        )
        return f"{drawn}\n{told}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds by phase, `updates`, `shares` and `reading`."""
        return {**asdict(self), "shares": self.shares, "reading": self.reading}


def measure_phases(trainer: Trainer[Any], before: TrainerSnapshot, data: Source, *, updates: int, warm: int) -> Phases:
    """Make a few updates from the user's data with a clock around each phase; the state is put back afterwards.

    On a device that works on its own each phase is waited for, so that they do not overlap as they do in a run.
    """
    twin = variant(trainer, average=trainer.average, fast=trainer.fast)
    spans = _Spans(twin, after=warm)
    clock = Clock(twin, warm=warm, updates=updates, segments=1)
    try:
        with spans.timed():
            source: Any = clock.over(data)
            source.epoch = spans.fetching(source.epoch)
            twin.fit(source, epochs=1)
            free_transfer_memory(twin._hooks)
    finally:
        before.restore()
    total = clock.stamps[-1] - clock.stamps[0]
    return spans.phases(total, updates)


class _Spans:
    """Adds up the time that methods of one trainer take, from the first update that counts on."""

    def __init__(self, trainer: Any, *, after: int) -> None:
        self._trainer, self._after = trainer, after
        self._seconds: dict[str, float] = dict.fromkeys(("data", "move", "model", "step", "apply", "update"), 0.0)
        self._depth: dict[str, int] = dict.fromkeys(self._seconds, 0)
        self._windows = 0

    def phases(self, total: float, updates: int) -> Phases:
        """The phases, out of what was timed inside one another."""
        seconds = self._seconds
        step = max(seconds["step"], seconds["model"])  # an `update` of the user's own may make no step at all
        forward = seconds["model"]
        backward = seconds["update"] - step - seconds["apply"] - seconds["move"]
        found = {
            "data": seconds["data"],
            "transfer": seconds["move"],
            "forward": forward,
            "loss": step - forward,
            "backward": max(0.0, backward),
            "update": seconds["apply"],
        }
        rest = max(0.0, total - sum(found.values()))
        return Phases(**{name: value / updates for name, value in found.items()}, rest=rest / updates, updates=updates)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Have the trainer's methods timed inside."""
        trainer = self._trainer
        trainer.training_step = self._around("step", trainer.training_step)
        trainer.apply_gradients = self._around("apply", trainer.apply_gradients)
        update = self._around("update", trainer.update)

        def counted(window: Any) -> Any:
            self._windows += 1
            return update(window)

        trainer.update = counted
        if trainer._hooks.move is not None:
            trainer._hooks = replace(trainer._hooks, move=self._around("move", trainer._hooks.move))
        model = trainer.model
        handles = [
            model.register_forward_pre_hook(lambda *_: self._begin("model")),
            model.register_forward_hook(lambda *_: self._end("model"), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fetching(self, epoch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same batches, with a clock around each."""

        def fetched(number: int, skip: int = 0) -> Iterator[Any]:
            iterator = epoch(number, skip)
            following = self._around("data", lambda: next(iterator, self))
            while (batch := following()) is not self:
                yield batch

        return fetched

    def _around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            self._begin(name)
            try:
                return method(*given, **named)
            finally:
                self._end(name)

        return timed

    def _begin(self, name: str) -> None:
        if not self._depth[name]:
            synchronise(self._trainer.device)
            self._seconds[name] -= time.perf_counter() if self._counts(name) else 0.0
        self._depth[name] += 1

    def _end(self, name: str) -> None:
        self._depth[name] -= 1
        if not self._depth[name]:
            synchronise(self._trainer.device)
            self._seconds[name] += time.perf_counter() if self._counts(name) else 0.0

    def _counts(self, name: str) -> bool:
        """Whether the update in hand is one that counts: data are fetched before theirs begins."""
        return self._windows > self._after or (name == "data" and self._windows == self._after)
