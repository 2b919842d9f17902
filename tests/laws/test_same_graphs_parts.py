"""Law Same, captured: steps of one's own, what they note, draws, statistics, averages, metrics, stops and resumes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laws.graph_runs import alike, both, fitted
from laws.late_runs import data, net, same
from laws.test_same_late import exploding, poisoned
from trainwright import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Mean,
    MixedPrecision,
    Step,
    StepLR,
    Sum,
    Trainer,
    Updates,
    accuracy,
)
from trainwright.base.errors import NonFiniteError
from trainwright.runtime.trial import Trial

pytestmark = pytest.mark.slow


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))


def padded() -> list[Any]:
    """Batches with targets that do not count, as many as never before in each; one has nothing else."""
    batches = data()
    for at, (x, y) in enumerate(batches):
        fewer = y.clone()
        fewer[: at % 4] = -100
        batches[at] = (x, fewer)
    batches[4] = (batches[4][0], torch.full_like(batches[4][1], -100))
    return batches


class Own(Trainer[Any]):
    """A step of one's own, that returns what `form` says."""

    form = "mean"

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        output = self.model(x)
        each = F.cross_entropy(output, y, reduction="none")
        self.log("largest", output.detach().abs().max())
        weights = 1.0 + y.float()
        return {
            "mean": each.mean,
            "Mean": lambda: Mean((each * weights).sum() / weights.sum(), weights.sum()),
            "Sum": lambda: Sum((each * weights).sum(), weights.sum()),
            "plain Sum": lambda: Sum(each.sum()),
            "Step": lambda: Step(each.mean(), output, y),
            "named": lambda: {"ce": each.mean(), "small": 0.01 * output.square().mean()},
            "own count": lambda: F.nll_loss(F.log_softmax(output, -1), y),
        }[self.form]()


FORMS = ("mean", "Mean", "Sum", "plain Sum", "Step", "named", "own count")


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_all_that_a_step_may_return(form: str, accumulate: int) -> None:
    kind = type("Returns", (Own,), {"form": form})
    slots = {"metrics": {"acc": accuracy}} if form == "Step" else {}
    ran = both(kind=kind, accumulate=accumulate, clip=0.5, **slots)
    assert "largest" in ran.records[-1].values
    assert form != "named" or {"ce", "small"} <= set(ran.records[-1].values)
    assert form != "Step" or "acc" in ran.trainer.history[0]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_draws_and_statistics(accumulate: int, watched: bool) -> None:
    ran = both(model=noisy, accumulate=accumulate, watched=watched, average=EMA(0.9))
    assert ran.weights["1.num_batches_tracked"] == 30


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))])
@pytest.mark.parametrize("accumulate", [1, 2, 6])
def test_targets_that_do_not_count(accumulate: int, loss: nn.Module) -> None:
    # Counts in a recording lie in float32 on the device.
    batches = padded() if accumulate > 1 else padded()[:4] + padded()[5:]
    both(loss=loss, batches=lambda: batches, accumulate=accumulate, fits=({"epochs": 6},), exact=False)


class Keeps:
    """A metric that keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.kept.append((output, target))

    def compute(self) -> float:
        return float(sum((output.argmax(-1) * (target + 1)).sum() for output, target in self.kept))

    def reset(self) -> None:
        self.kept = []


def test_metrics_of_training_and_validation() -> None:
    ran = both(metrics={"acc": accuracy, "kept": Keeps()}, val=data(2), fits=({"epochs": 5, "validate": Updates(4)},))
    assert {"acc", "kept", "val_acc", "val_kept"} <= set(ran.trainer.history[-1])


def test_early_stopping_ends_at_the_same_update() -> None:
    stops = {"early_stopping": EarlyStopping("val_loss", patience=2), "val": data(2)}
    ran = both(optimizer="sgd", fits=({"epochs": 40, "validate": Updates(3)},), **stops)
    assert ran.trainer.result is not None
    assert "val_loss" in ran.trainer.result.stopped
    assert ran.trainer.result.updates < 200


def test_several_fits_go_on() -> None:
    both(fits=({"epochs": 2}, {"epochs": 3}), watched=False, schedule=StepLR(Updates(3), 0.7), exact=False)


@pytest.mark.parametrize("graphs", [("require", "require"), ("require", False), (False, "require")])
def test_a_run_that_is_resumed_in_the_middle_goes_on(graphs: tuple[Any, Any], tmp_path: Path) -> None:
    whole = fitted(False, model=noisy, fits=({"epochs": 6},), watched=False)

    def part(graph: Any, updates: int) -> Any:
        checkpoint = Checkpoint(tmp_path, every=Updates(5))
        ends = {"epochs": 6, "resume": "auto"}
        return fitted(graph, model=noisy, kind=Halts, fits=(ends,), watched=False, checkpoint=checkpoint,
                      prepare=lambda trainer: setattr(trainer, "last", updates))  # fmt: skip

    part(graphs[0], 3)
    resumed = part(graphs[1], 99)
    assert resumed.error is None
    assert resumed.trainer.result is not None
    assert resumed.trainer.result.updates == 36
    assert not graphs[1] or sum(resumed.replays)
    assert same(resumed.weights, whole.weights)
    assert same(resumed.moments, whole.moments)


class Halts(Trainer[Any]):
    """Stops after an epoch."""

    last = 99

    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.progress.epoch >= self.last:
            self.stop("enough")


POLICIES: dict[str, Any] = {
    "raise": {},
    "raise, clipped": {"clip": 0.5, "accumulate": 2},
    "skip": {"nonfinite": "skip"},
    "ignore": {"nonfinite": "ignore"},
    "fp16": {"precision": MixedPrecision("fp16", init_scale=2.0**20, growth_interval=3)},
    "fp16, skip": {"precision": MixedPrecision("fp16", init_scale=2.0**20), "nonfinite": "skip"},
}


class Switched(nn.Module):
    """A layer whose gradient is infinite for a batch that begins with 7, told on the device."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sometimes.apply(self.layer(x), x[0, 0] == 7.0)


class Sometimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.where(ctx.saved_tensors[0], gradient * torch.inf, gradient), None


def fails_late(what: str) -> list[Any]:
    """Many good batches, one that is not finite, and some more."""
    bad = poisoned(2) if what == "loss" else exploding(2)
    return [*data() * 4, *bad, *data() * 2]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_finite_at_a_replay(policy: str, what: str) -> None:
    raises = policy.startswith("raise") or (policy == "fp16" and what == "loss")

    def model() -> nn.Module:
        made = net(norm=policy.startswith("raise"))
        return nn.Sequential(Switched(made[0]), *made[1:])

    how = {"batches": lambda: fails_late(what), "fits": ({"epochs": 1},), **POLICIES[policy]}
    ran = both(model=model, errors=True, least=5, **how)
    assert isinstance(ran.error, NonFiniteError) == raises
    at = 14 if "accumulate" in how else 27
    assert policy == "fp16" or not raises or f"update {at}:" in str(ran.error)
    assert policy == "ignore" or all(bool(torch.isfinite(weight).all()) for weight in ran.weights.values())


class Weighs(nn.Module):
    """A loss with weights of its own, and statistics that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = nn.Buffer(torch.zeros(3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * output.mean(0))
        return F.cross_entropy(output * self.scale + self.seen, target) + self.scale.square().mean()


def test_what_a_loss_trains_and_keeps() -> None:
    ends: list[Any] = []

    class Trains(Trainer[Any]):
        def __init__(self, model: Any, optimizer: Any, loss: Any, **slots: Any) -> None:
            optimizer.add_param_group({"params": loss.parameters(), "lr": 0.02})
            super().__init__(model, optimizer, loss, **slots)

        def end_epoch(self, metrics: dict[str, float]) -> None:
            ends.append([value.clone() for value in self.loss.state_dict().values()])

    both(kind=Trains, loss=Weighs(), watched=False)
    alike(ends[:5], ends[5:])


class Remembers(Trainer[Any]):
    """A step that writes to tensors of its own."""

    def __init__(self, *given: Any, **slots: Any) -> None:
        super().__init__(*given, **slots)
        self.teacher = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
        self.queue, self.at = torch.zeros(4, 3), torch.zeros((), dtype=torch.int64)

    def training_step(self, batch: Any) -> Any:
        output = self.model(batch[0])
        loss = F.cross_entropy(output, batch[1]) + (output - self.queue.mean(0)).square().mean()
        loss = loss + (output - self.teacher(batch[0])).square().mean()
        with torch.no_grad():
            self.queue.index_copy_(0, (self.at % 4).reshape(1), output.detach().mean(0, keepdim=True))
            self.at += 1
            for mine, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return loss


@pytest.mark.parametrize("watched", [True, False])
def test_tensors_that_a_step_writes_to(watched: bool) -> None:
    ran = both(kind=Remembers, watched=watched)
    assert ran.trainer.at == 30


def test_a_recording_is_not_trusted_where_nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first updates of a run under a loss scale that is too high move nothing."""
    tried: list[Any] = []
    real = Trial.difference.fget
    assert real is not None
    monkeypatch.setattr(Trial, "difference", property(lambda self: tried.append(real(self)) or tried[-1]))
    both(optimizer="sgd", precision=MixedPrecision("fp16", init_scale=2.0**40, growth_interval=100))
    assert tried[0] is None
    assert tried[-1] is not None


def test_an_interrupt_of_a_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []

    def model() -> nn.Module:
        models.append(noisy())
        return models[-1]

    @contextmanager
    def interrupted(trial: Trial) -> Iterator[None]:
        yield
        assert not same(before(), trial._before[0])
        raise KeyboardInterrupt

    def before() -> torch.Tensor:
        return next(iter(models[0].parameters())).detach()

    monkeypatch.setattr(Trial, "one_way", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted("require", model=model, watched=False)
    three = fitted(False, model=model, watched=False, fits=({"max_updates": 3},))
    alike(models[0].state_dict(), three.weights)


BATCHES: dict[str, Callable[[Any, Any, int], Any]] = {
    "nested": lambda x, y, at: {"in": {"x": x, "mask": None}, "y": y, "kind": (1, "a")},
    "named": lambda x, y, at: Named(x, y),
    "other strides": lambda x, y, at: [x.t().contiguous().t() if at % 2 else x, y],
    "one row for all": lambda x, y, at: [x[:1].expand(len(y), 5), y],
    "whole numbers": lambda x, y, at: [(x * 50).to(torch.int16), y.to(torch.int32)],
}


class Named(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    y: torch.Tensor


class Reads(Trainer[Any]):
    """A step that knows all kinds of batches."""

    def training_step(self, batch: Any) -> Any:
        x, y = (batch["in"]["x"], batch["y"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(self.model(x.float()), y.long())


@pytest.mark.parametrize("batch", BATCHES)
def test_batches_of_all_kinds(batch: str) -> None:
    both(kind=Reads, batches=lambda: [BATCHES[batch](x, y, at) for at, (x, y) in enumerate(data())])
