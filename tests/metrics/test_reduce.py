"""Sums of several processes: what they add up to is what one process sums, once, whatever is where."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.pool import RankFailed, pool
from trainwright import MeanLoss, SettingError, StepOutput, SumLoss, Trainer
from trainwright.distributed.mesh import Shard
from trainwright.distributed.world import ProcessGroupWorld, World
from trainwright.metrics import Derived
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.metrics import accuracy, top_k
from trainwright.metrics.reduce import reduce_to_rank0
from trainwright.metrics.scores import F1, MAE, R2, RMSE
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.window import rows_of

SIZES = (1, 7, 51, 64)
BATCH = 16
RANKS = (2, 3)
HOOKS: Any = SimpleNamespace(
    count=None, overrides_count=False, rows=rows_of, has_custom_update=False, overrides_compute_gradients=False
)


class Area:
    """The area under the ROC curve: needs all rows; kept in attributes."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        self.scores.append(output[:, 1])
        self.truth.append(target == 1)

    def compute(self) -> float:
        scores, truth = torch.cat(self.scores), torch.cat(self.truth)
        yes, no = scores[truth], scores[~truth]
        return float((yes[:, None] > no).double().mean()) if len(yes) and len(no) else 0.5

    def reset(self) -> None:
        self.scores, self.truth = list[Tensor](), list[Tensor]()

    def merge(self, other: Area) -> None:
        self.scores += other.scores
        self.truth += other.truth


def classes(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    output = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 4, (rows,), generator=generator)
    return output, torch.where(torch.rand(rows, generator=generator) < 0.2, -100, target)


def values(output: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, :2] + 1e6, output[:, 2:] * 3 + 1e6


def of_values(metric: Any) -> Any:
    """A metric that reads two columns of values out of scores."""

    class Fed(type(metric)):  # type: ignore[misc]
        def update(self, output: Tensor, target: Tensor) -> None:
            super().update(*values(output))

    return Fed()


def loss_of_each(output: Tensor, target: Tensor) -> Tensor:
    return (output.logsumexp(1) - output[:, 0]).square()


def metrics() -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "top_2": top_k(2),
        "each": loss_of_each,
        "whole": lambda output, target: output.mean(),
        "of_known": lambda output, target: SumLoss((target * (target != -100)).sum(), (target != -100).sum()),
        "nothing": lambda output, target: MeanLoss(torch.tensor(math.nan), 0),
        "mae": lambda output, target: MAE()(*values(output)),
        "rmse": of_values(RMSE()),
        "r2": of_values(R2()),
        "f1": F1(),
        "f1_weighted": F1("weighted"),
        "area": Area(),
        "derived": Derived(lambda numbers: math.exp(numbers["loss"]) + numbers["accuracy"]),
    }


def evaluated(world: World, rows: int, *, twice: bool = False) -> dict[str, Any]:
    """The numbers of an evaluation of `rows` rows, of which each process takes in its own."""
    output, target = classes(rows)
    meters = MetricSet(metrics(), spread=True)
    tracker, part = LossTracker(meters, HOOKS), Shard(world.rank, world.size)
    for index, start in enumerate(range(0, rows, BATCH)):
        size = min(BATCH, rows - start)
        run, own = part.run(size), part.of(size)
        x, y = output[start : start + size][run.start : run.stop], target[start : start + size][run.start : run.stop]
        if len(own):
            tracker.batch = (x, y)
            kept = y != -100
            loss = loss_of_each(x, y)[kept].mean() if kept.any() else torch.tensor(math.nan)
            tracker.record(StepOutput(MeanLoss(loss, int(kept.sum())), x, y))
            if index == 1 and own.start == 0:
                tracker.log("sometimes", float(x[0, 0]), 1)
        if twice:
            tracker.merge(world)
    tracker.merge(world)
    if twice:
        tracker.merge(world)
    if not world.is_main:
        return {"fed": meters.can_compute, "sums": tracker.state_dict()["sums"]}
    return tracker.means() | {f"{name}_error": error for name, error in meters.errors().items()}


def evaluated_by_all(rows: tuple[int, ...], twice: bool) -> list[dict[str, Any]]:
    return [evaluated(ProcessGroupWorld(), n, twice=twice) for n in rows]


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "after every batch"])
def test_numbers_of_several_processes_are_those_of_one(ranks: int, twice: bool) -> None:
    answers = pool(ranks).run(evaluated_by_all, SIZES, twice)
    for index, rows in enumerate(SIZES):
        wanted = evaluated(World(), rows)
        assert math.isnan(wanted["nothing"])
        same(answers[0][index], wanted)
        for other in answers[1:]:
            assert other[index] == {"fed": False, "sums": {}}


def test_an_epoch_goes_on_from_what_the_first_process_has_saved() -> None:
    for first in pool(2).run(resumed)[:1]:
        same(first, evaluated(World(), 51))


def resumed() -> dict[str, Any]:
    world = ProcessGroupWorld()
    output, target = classes(51)

    def take(tracker: LossTracker, start: int, end: int) -> None:
        own = Shard(world.rank, world.size).of(end - start)
        x, y = output[start:end][own.start : own.stop], target[start:end][own.start : own.stop]
        tracker.batch = (x, y)
        kept = y != -100
        tracker.record(StepOutput(MeanLoss(loss_of_each(x, y)[kept].mean(), int(kept.sum())), x, y))
        if start == 16 and own.start == 0:
            tracker.log("sometimes", float(x[0, 0]), 1)

    def fresh() -> LossTracker:
        return LossTracker(MetricSet(metrics(), spread=True), HOOKS)

    before, after = fresh(), fresh()
    for start in (0, 16):
        take(before, start, start + 16)
    before.merge(world)
    saved = before.state_dict()
    if world.is_main:
        after.load_state_dict(saved)
    for start in (32, 48):
        take(after, start, min(start + 16, 51))
    after.merge(world)
    assert after.metrics is not None
    errors = after.metrics.errors() if world.is_main else {}
    return after.means() | {f"{name}_error": error for name, error in errors.items()} if world.is_main else {}


# --- what is sent


class Whole:
    """A class that counts and has no `merge`."""

    def __init__(self) -> None:
        self.hits, self.seen = 0, torch.zeros(())

    def update(self, output: Any, target: Any) -> None: ...
    def compute(self) -> float:
        return 1.0

    def reset(self) -> None: ...


class Unsent(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: None

    def merge(self, other: Any) -> None: ...


def test_an_object_without_merge_is_refused_with_the_member_to_write() -> None:
    meters = MetricSet({"hits": Whole()})
    with pytest.raises(SettingError, match=r"Whole has no `merge`") as caught:
        meters.check_mergeable()
    assert "def merge(self, other): self.hits += other.hits; self.seen += other.seen" in str(caught.value)


def built() -> None:
    Trainer(torch.nn.Linear(2, 2), None, None, metrics={"hits": Whole()}, console=False)


def test_a_trainer_of_several_processes_refuses_it_when_it_is_built() -> None:
    built()
    with pytest.raises(RankFailed) as caught:
        pool(2).run(built)
    assert str(caught.value).count("Whole has no `merge`") == 2


def test_an_object_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(SettingError, match="Unsent cannot be sent to another rank"):
        MetricSet({"hits": Unsent()}).check_mergeable()


def test_shipped_metrics_need_nothing() -> None:
    MetricSet(metrics()).check_mergeable()


def test_a_lone_process_gathers_nothing_and_keeps_what_it_has() -> None:
    class Silent(World):
        def gather_on_rank0(self, value: Any) -> Any:
            raise AssertionError

    meters = MetricSet({"hits": Whole(), "accuracy": accuracy})
    meters.update(*classes(7), 7)
    reduce_to_rank0(Silent(), [meters])
    assert meters.can_compute


def test_what_a_probe_returned_counts_once() -> None:
    assert [answer["sharpness"] for answer in pool(3).run(probed)[:1]] == [1.0]


def probed() -> dict[str, float]:
    world, tracker = ProcessGroupWorld(), LossTracker(None, HOOKS)
    tracker.record_probe({"sharpness": 1.0 + world.rank}, "sharp")
    tracker.merge(world)
    return tracker.means()
