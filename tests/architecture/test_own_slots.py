"""Every slot can be filled by a minimal class of a user's own, and what it does is what happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright import Checkpoint, DataError, EarlyStopping, Observer, Plan, Result, SettingError, Trainer
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.data.source import Source
from trainwright.distributed.world import World
from trainwright.fit.early_stopping import NO_ERRORS, EarlyStopper
from trainwright.observers import Best, Saved, Update
from trainwright.precision import LossScale, Precision
from trainwright.schedules.bound import BoundSchedule

DATA = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]


class OwnPrecision(Precision):
    """bf16 autocast with a fixed loss scale; counts what it is asked for."""

    def __init__(self, *, scaled: bool) -> None:
        self.scaled = scaled
        self.adapted: list[bool] = []
        self.prepared: list[nn.Module] = []
        self.updates = 0

    def prepare_model(self, model: nn.Module) -> None:
        self.prepared.append(model)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.bfloat16)

    def loss_scale(self, device_type: str) -> LossScale | None:
        return OwnLossScale(self) if self.scaled else None

    def after_update(self) -> None:
        self.updates += 1


class OwnLossScale(LossScale):
    """A scale of 8 for good."""

    def __init__(self, precision: OwnPrecision) -> None:
        self.precision = precision

    @property
    def scale(self) -> float:
        return 8.0

    def adapt(self, overflowed: bool) -> None:
        self.precision.adapted.append(overflowed)


class OwnClip:
    """Clips nothing; counts."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, parameters: list[Tensor]) -> Tensor | None:
        assert all(parameter.grad is not None for parameter in parameters)
        self.seen += 1
        return None


class OwnSchedule:
    """The rate is one over the number of the update."""

    def bind(self, optimizer: Optimizer, plan: Plan) -> OwnBoundSchedule:
        return OwnBoundSchedule(optimizer)


class OwnBoundSchedule(BoundSchedule):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def apply(self, updates: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1 / (updates + 1)

    def observe(self, metrics: Mapping[str, float]) -> None:
        assert "val_loss" in metrics


class OwnStopping(EarlyStopping):
    """Stops at the third validation, whatever it says."""

    def bind(self) -> EarlyStopper:
        return OwnStopper(self)


class OwnStopper(EarlyStopper):
    def judge(
        self, metrics: Mapping[str, float], errors: Mapping[str, float] = NO_ERRORS, *, epoch: int, update: int
    ) -> bool:
        self.waited += 1
        return False

    @property
    def stopped(self) -> str:
        return "three are enough" if self.waited == 3 else ""


class OwnCheckpoint(Checkpoint):
    """Checkpoints in memory."""

    def bind(self, run_id: str, *, world: World | None = None) -> CheckpointManager:
        managers.append(OwnManager(self, run_id))
        return managers[-1]


class OwnManager(CheckpointManager):
    """Keeps the trees of all checkpoints in memory."""

    def __init__(self, settings: Checkpoint, run_id: str) -> None:
        super().__init__(settings, run_id)
        self.trees: dict[int, Any] = {}
        self.released = False

    def prepare(self, *, resuming: bool) -> None:
        assert not resuming

    def save(self, tree: Mapping[str, Any], *, update: int, **_: Any) -> None:
        self.trees[update] = tree
        self._saved.append(Saved(Path("nowhere"), update, best=False))

    def release(self, *, wait: bool = True) -> None:
        self.released = True


managers: list[OwnManager] = []


class OwnMetric:
    """Counts rows."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        self.rows += len(target)

    def compute(self) -> float:
        return float(self.rows)

    def reset(self) -> None:
        self.rows = 0


class OwnObserver(Observer):
    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.result: Result | None = None

    def on_update(self, update: Update) -> None:
        self.updates.append(update)

    def on_fit_end(self, result: Result) -> None:
        self.result = result


class OwnSource(Source):
    """Four batches, another order in odd epochs."""

    length: int | None = 4
    rows: int | None = 32
    batch_size: int | None = 8
    repeatable = True
    draws_global_rng = False

    def describe(self) -> str:
        return "four batches"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        return iter((DATA if epoch % 2 == 0 else DATA[::-1])[skip:])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, tree: Any) -> None:
        assert tree == {}


def trainer(**slots: Any) -> Trainer[nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False, **slots)


@pytest.mark.parametrize("scaled", [True, False])
def test_precision(scaled: bool) -> None:
    precision = OwnPrecision(scaled=scaled)
    own, known = trainer(precision=precision), trainer(precision="bf16")
    own.fit(DATA, epochs=1)
    known.fit(DATA, epochs=1)
    assert torch.equal(own.model.weight, known.model.weight)
    assert precision.adapted == [False] * (4 if scaled else 0)
    assert (precision.prepared, precision.updates) == ([own.model], 4)


def test_a_precision_that_overrides_nothing_changes_nothing() -> None:
    own, plain = trainer(precision=Precision()), trainer()
    for one in (own, plain):
        one.fit(DATA, epochs=1)
    assert torch.equal(own.model.weight, plain.model.weight)


def test_a_precision_that_is_no_subclass_is_refused() -> None:
    class Lookalike:
        def autocast(self, device_type: str) -> None: ...

    with pytest.raises(SettingError, match="a Precision of your own"):
        trainer(precision=Lookalike())


def test_clip() -> None:
    clip = OwnClip()
    trainer(clip=clip, accumulate=2).fit(DATA, epochs=1)
    assert clip.seen == 2


def test_schedule() -> None:
    watching = OwnObserver()
    trainer(schedule=OwnSchedule(), observers=[watching]).fit(DATA, DATA, epochs=1)
    assert [update.lr for update in watching.updates] == [1, 1 / 2, 1 / 3, 1 / 4]


def test_early_stopping() -> None:
    result = trainer(early_stopping=OwnStopping("val_loss", restore_best=False)).fit(DATA, DATA, epochs=9)
    assert (result.stopped, result.epochs) == ("three are enough", 3)


def test_early_stopping_that_restores_the_best_weights_beside_a_checkpoint() -> None:
    class Restoring(EarlyStopping):
        def bind(self) -> EarlyStopper:
            return FirstIsBest(self)

    class FirstIsBest(OwnStopper):
        def judge(
            self, metrics: Mapping[str, float], errors: Mapping[str, float] = NO_ERRORS, *, epoch: int, update: int
        ) -> bool:
            super().judge(metrics, errors, epoch=epoch, update=update)
            self.best = Best("val_loss", 1.0, epoch, update) if self.waited == 1 else self.best
            return self.waited == 1

    own = trainer(early_stopping=Restoring("val_loss"), checkpoint=OwnCheckpoint("nowhere"))
    assert own.fit(DATA, DATA, epochs=9).weights == "best of epoch 1"
    assert torch.equal(managers[-1].trees[4]["model"]["weight"], own.model.weight)


def test_checkpoint() -> None:
    own = trainer(checkpoint=OwnCheckpoint("nowhere"))
    own.fit(DATA, epochs=2)
    (manager,) = managers[-1:]
    assert list(manager.trees) == [4, 8]
    assert torch.equal(manager.trees[8]["model"]["weight"], own.model.weight)
    assert manager.released


def test_metric() -> None:
    result = trainer(metrics={"seen": OwnMetric()}).fit(DATA, DATA[:3], epochs=2)
    assert [(row["seen"], row["val_seen"]) for row in result.history] == [(32, 24), (32, 24)]


def test_observer() -> None:
    watching = OwnObserver()
    result = trainer(observers=[watching]).fit(DATA, epochs=1)
    assert [update.update for update in watching.updates] == [1, 2, 3, 4]
    assert watching.result is result


def test_source() -> None:
    own, known = trainer(), trainer()
    own.fit(OwnSource(), OwnSource(), epochs=2)
    known.fit(lambda epoch: DATA if epoch == 0 else DATA[::-1], epochs=2)
    assert own.progress.rows == 64
    assert torch.equal(own.model.weight, known.model.weight)


def test_a_source_that_is_no_subclass_is_refused() -> None:
    class Alike:
        def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
            return iter(DATA)

    with pytest.raises(DataError, match=r"an Alike has epoch\(\), and is no Source(.|\n)*class Alike\(Source\)"):
        trainer().fit(Alike(), epochs=1)
