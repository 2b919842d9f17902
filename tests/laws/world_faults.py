"""Faults that training on several processes really has: each function plants one on a process, by a monkeypatch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from trainwright.data.row_batches import Batches
from trainwright.distributed.ddp import Wrapped
from trainwright.distributed.mesh import Shard
from trainwright.distributed.world import ProcessGroupWorld
from trainwright.evaluation import passes
from trainwright.fit import rollback
from trainwright.fit.boundary import Boundary
from trainwright.schedules.table import TableSchedule
from trainwright.update import distributed_check
from trainwright.update.distributed_check import DistributedCheck, ShardedWindow
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.losses import StepLoss
from trainwright.update.per_rank_state import epoch_batches

Patch = pytest.MonkeyPatch


def planted(fault: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on this process with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        getattr(sys.modules[__name__], fault)(patch)
        return function(*args)


# Gradients.


def no_sync_is_dropped(patch: Patch) -> None:
    patch.setattr(Wrapped, "__call__", lambda self, batch, *, last: self.ddp(batch))


def processes_weigh_alike(patch: Patch) -> None:
    whole = DistributedCheck._record_stats

    def weight_of(self: ShardedWindow, count: Any, *, is_sum: bool, has_rows: bool) -> float:
        return (1 / (count or 1) if is_sum else 1.0) / len(self.batches) if has_rows else 0.0

    def record_stats(self: DistributedCheck, loss: Tensor, count: Any, weight: Any) -> None:
        window = self._window
        whole(self, loss.detach().nan_to_num(0.0), window.all_rows / window.ranks / len(window.batches), weight)

    patch.setattr(ShardedWindow, "weight_of", weight_of)
    patch.setattr(DistributedCheck, "_record_stats", record_stats)


def gradients_are_summed(patch: Patch) -> None:
    missing: Any = ShardedWindow.missing_factor
    patch.setattr(ShardedWindow, "missing_factor", property(lambda self: missing.fget(self) * self.ranks))


def what_counts_elsewhere_is_not_known(patch: Patch) -> None:
    patch.setattr(ShardedWindow, "missing_factor", 1.0)


def a_dummy_counts(patch: Patch) -> None:
    patch.setattr(Shard, "of", lambda self, rows, of=Shard.of: of(self, rows) or self.run(rows))
    patch.setattr(Shard, "run", lambda self, rows: range(rows // self.served(rows)))


def noise_of_a_dummy_stays(patch: Patch) -> None:
    patch.setattr(distributed_check, "rng_preserved", nullcontext)


def numbers_of_a_dummy_stay(patch: Patch) -> None:
    record, add = LossTracker.record, LossTracker._add

    def recorded(self: LossTracker, returned: Any) -> StepLoss | None:
        own, self.recording = self.recording, True
        step_loss = record(self, returned)
        self.recording = own
        return step_loss

    patch.setattr(LossTracker, "record", recorded)
    patch.setattr(LossTracker, "_add", lambda self, loss: add(self, replace(loss, count=loss.count or 1)))


# The order, and the schedule.


def every_epoch_has_the_order_of_the_first(patch: Patch) -> None:
    order = Batches._order
    patch.setattr(Batches, "_order", lambda self, seed, epoch: order(self, seed, 0))


def each_process_shuffles_by_itself(patch: Patch) -> None:
    patch.setattr(rollback, "epoch_batches", lambda world, source, epoch, *, skip=0: iter(source.epoch(epoch)))


def the_schedule_steps_on_each_process(patch: Patch) -> None:
    whole = TableSchedule.apply

    def apply(self: TableSchedule, updates: int) -> None:
        last = self._length - 1
        whole(self, min(updates * dist.get_world_size(), max(last, updates)))

    patch.setattr(TableSchedule, "apply", apply)


# Numbers and decisions.


def statistics_stay_apart(patch: Patch) -> None:
    patch.setattr(passes, "rank0_buffers", lambda trainer: nullcontext())


def the_first_ones_numbers_are_reported(patch: Patch) -> None:
    patch.setattr(LossTracker, "merge", lambda self, world: None)


def each_evaluates_all_rows(patch: Patch) -> None:
    def all_rows(trainer: Any, source: Any, tracker: LossTracker) -> Any:
        tracker.recording = True
        return (one.batch for one in epoch_batches(trainer.world, source, 0))

    patch.setattr(passes, "shard_batches", all_rows)


def each_judges_by_its_own_numbers(patch: Patch) -> None:
    validate = Boundary.validate

    def alone(self: Boundary, evaluate: Callable[..., Mapping[str, float]], **how: bool) -> dict[str, float]:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(LossTracker, "merge", lambda self, world: None)
            inside.setattr(ProcessGroupWorld, "broadcast", lambda self, value: value)
            inside.setattr(self.trainer, "is_main", True)
            return validate(self, evaluate, **how)

    patch.setattr(Boundary, "validate", alone)
