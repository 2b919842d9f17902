"""Law Same, captured: what a replay would make otherwise is not recorded, the reason is told, nothing is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laws.graph_runs import Ran, both, check_same, fitted
from laws.late_runs import data, net
from trainwright import Fast, StepLR, Trainer, Updates, checkpoint_activations
from trainwright.base.errors import SettingError
from trainwright.run import graphed

pytestmark = pytest.mark.slow

COUNTED = [0]


class Own(Trainer[Any]):
    """A step that does one thing more."""

    more: Any = None
    seen = 0

    def training_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        loss = F.cross_entropy(self.model(x), y)
        factor = type(self).more(self, loss)
        return loss if factor is None else loss * factor


def counts(trainer: Any, loss: torch.Tensor) -> float:
    trainer.seen += 1
    return 1 + 0.05 * trainer.seen


def counts_in_model(trainer: Any, loss: torch.Tensor) -> float:
    trainer.model[0].seen = getattr(trainer.model[0], "seen", 0) + 1
    return float(1 + 0.05 * trainer.model[0].seen)


def counts_apart(trainer: Any, loss: torch.Tensor) -> float:
    COUNTED[0] += 1
    return 1 + 0.05 * (COUNTED[0] % 30)


def keeps_an_average(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    trainer.seen = 0.9 * trainer.seen + 0.1 * loss.detach()
    return 1 + trainer.seen


def keeps_outputs(trainer: Any, loss: torch.Tensor) -> None:
    trainer.__dict__.setdefault("kept", []).append(loss.detach())


def logs(trainer: Any, loss: torch.Tensor) -> None:
    trainer.log("seven", 7.0)


def caught(trainer: Any, loss: torch.Tensor) -> float:
    try:
        return 1.0 + 0.01 * trainer.progress.updates
    except Exception:
        return 1.0


def own_draws(trainer: Any, loss: torch.Tensor) -> float:
    trainer.__dict__.setdefault("rng", np.random.default_rng(0))
    return float(trainer.rng.uniform(0.9, 1.1))


def from_an_iterator(trainer: Any, loss: torch.Tensor) -> float:
    trainer.__dict__.setdefault("factors", itertools.cycle([1.0, 0.99, 0.98]))
    return float(next(trainer.factors))


def from_a_generator(trainer: Any, loss: torch.Tensor) -> float:
    trainer.__dict__.setdefault("factors", (1.0 + 1 / n for n in range(1, 99)))
    return float(next(trainer.factors))


@dataclass(slots=True)
class Slots:
    """Settings in slots."""

    tau: float = 1.0


def counts_in_slots(trainer: Any, loss: torch.Tensor) -> float:
    settings = trainer.__dict__.setdefault("settings", Slots())
    settings.tau *= 0.99
    return float(settings.tau)


def noted(trainer: Any, loss: torch.Tensor) -> None:
    trainer.state["steps"] = trainer.state.get("steps", 0) + 1


def mean_of_numbers(trainer: Any, loss: torch.Tensor) -> float:
    return random.uniform(0.9, 1.1)


STEPS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a number read": (lambda t, loss: 1.0 + 0.1 * loss.item(), "operation not permitted when stream is capturing"),
    "a branch on a number": (lambda t, loss: 2.0 if loss > 1 else 1.0, "operation not permitted when stream"),
    "an attribute of the trainer counted": (counts, "an update changes Does.seen"),
    "an attribute of the model counted": (counts_in_model, "an update changes model.0.seen"),
    "a variable counted": (counts_apart, "an update changes"),
    "an average kept": (keeps_an_average, "an update changes Does.seen"),
    "outputs kept": (keeps_outputs, "an update changes Does.kept"),
    "Python's random": (mean_of_numbers, "an update draws from Python's random"),
    "NumPy's random": (lambda t, loss: float(np.random.uniform(0.9, 1.1)), "an update draws from NumPy's random"),
    "a generator of its own": (own_draws, "an update changes Does.rng"),
    "an iterator": (from_an_iterator, "an update changes Does.factors"),
    "a generator of numbers": (from_a_generator, "an update changes Does.factors"),
    "slots": (counts_in_slots, "an update changes Does.settings"),
    "the progress read": (lambda t, loss: 1.0 + 0.01 * t.progress.updates, "the step reads `self.progress`"),
    "the progress read, and errors caught": (caught, "the step reads `self.progress`"),
    "the history read": (lambda t, loss: 1.0 + len(t.history), "the step reads `self.history`"),
    "the rate read": (lambda t, loss: 1 + t.optimizer.param_groups[0]["lr"], "the step reads the settings of the opti"),
    "the state": (noted, "an update changes Does.state"),
    "log of a number": (logs, "log('seven', ...) of a number that the host has computed"),
}


def doing(step: Callable[[Any, Any], Any]) -> type[Trainer[Any]]:
    return type("Does", (Own,), {"more": step})


def afresh(trainer: Any) -> None:
    COUNTED[0] = 0
    random.seed(0)
    np.random.seed(0)


def check_refused(reason: str, **how: Any) -> None:
    """Nothing is replayed, the reason is told, all is as without; under "require" that is an error, and no more."""
    eager, auto = fitted(False, **how), fitted("auto", **how)
    check_same(auto, eager)
    assert not sum(auto.replays)
    assert reason in auto.trainer.fast_path
    assert auto.trainer.fast_path[:2] in ("L1", "L0")
    required = fitted("require", **how)
    assert isinstance(required.error, SettingError)
    assert reason in str(required.error)
    assert 'Fast(cuda_graphs="require"), and updates cannot be recorded' in str(required.error)
    check_usable(required, how)


def check_usable(required: Ran, how: dict[str, Any]) -> None:
    """After the error the trainer trains, and the process draws as ever."""
    assert all(bool(torch.isfinite(weight).all()) for weight in required.weights.values())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    trainer = required.trainer
    trainer.fast, trainer.state = Fast(cuda_graphs="auto"), {}
    before = {name: value.clone() for name, value in required.weights.items()}
    result = trainer.fit(how.get("batches", data)(), epochs=2)
    assert result.updates
    assert not torch.equal(before["0.weight"], trainer.model.state_dict()["0.weight"])


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_does_beside_its_numbers(step: str) -> None:
    does, reason = STEPS[step]
    check_refused(reason, kind=doing(does), watched=step != "log of a number", prepare=afresh)


def test_a_hook_of_ones_own() -> None:
    def hooked() -> nn.Module:
        model = net()
        model[0].register_forward_hook(lambda *_: COUNTED.__setitem__(0, COUNTED[0] + 1))
        return model

    check_refused("a hook on 0", model=hooked)


def test_a_hook_of_a_parameter() -> None:
    def hooked() -> nn.Module:
        model = net()
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        return model

    check_refused("a hook on 0.weight", model=hooked)


def test_blocks_that_are_recomputed() -> None:
    def recomputed() -> nn.Module:
        model = net()
        checkpoint_activations(model, "0")
        return model

    check_refused("blocks are recomputed", model=recomputed)


def test_a_hook_that_comes_in_an_epoch() -> None:
    class Hooks(Trainer[Any]):
        def begin_epoch(self, epoch: int) -> None:
            if epoch == 2:
                self.model[0].register_forward_hook(lambda module, given, output: output * 0.5)

    ran = both(graphs="auto", kind=Hooks, watched=False)
    assert "a hook on 0" in ran.trainer.fast_path


def test_a_state_that_comes_in_an_epoch() -> None:
    class Scales(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.model(batch[0]), batch[1]) * self.state.get("tau", 1.0)

        def end_epoch(self, metrics: dict[str, float]) -> None:
            if self.progress.epoch == 2:
                self.state["tau"] = 0.25

    ran = both(graphs="auto", kind=Scales, watched=False)
    assert "`self.state` may be read and written by a step" in ran.trainer.fast_path


def test_a_batch_that_holds_an_object() -> None:
    def labelled() -> list[Any]:
        return [(x, y, object()) for x, y in data()]

    check_refused("a batch holds a object", kind=doing(lambda *_: None), batches=labelled)


class Writes(Trainer[Any]):
    """Writes to its batch."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x.mul_(0.9)), y)


class Copies(Writes):
    """The same, to a copy."""

    def to_device(self, batch: Any) -> Any:
        return [tensor.clone() for tensor in batch]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_writes_to_its_batch(accumulate: int) -> None:
    check_refused("an update writes to its batch, which is no copy", kind=Writes, accumulate=accumulate)
    both(kind=Copies, accumulate=accumulate)


def test_a_sparse_batch() -> None:
    def sparse() -> list[Any]:
        return [(x, y, torch.eye(len(y)).to_sparse()) for x, y in data()]

    check_refused("a batch holds a sparse or nested tensor", kind=doing(lambda *_: None), batches=sparse)


def test_numbers_in_a_batch_that_differ_in_each() -> None:
    class Weighed(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            x, y, weight = batch
            return F.cross_entropy(self.model(x), y) * weight

    ran = both(
        graphs="auto", least=0, kind=Weighed, batches=lambda: [(x, y, 0.1 * i) for i, (x, y) in enumerate(data())]
    )
    assert len(ran.replays) == graphed.FORMS


@pytest.mark.parametrize("graphs", ["auto", "require"])
def test_forms_beyond_the_limit_run_as_ever(graphs: str) -> None:
    def shapes() -> list[Any]:
        x, y = torch.randn(40, 5), torch.arange(40) % 3
        return [(x[:size], y[:size]) for size in (2, 3, 4, 5, 6, 7, 2, 3)]

    ran = both(graphs=graphs, batches=shapes, watched=False)
    assert len(ran.replays) == graphed.FORMS
    assert "4 recorded" in ran.trainer.fast_path


def test_shapes_that_never_come_again() -> None:
    def shapes() -> list[Any]:
        x, y = torch.randn(100, 5), torch.arange(100) % 3
        return [(x[:size], y[:size]) for size in range(2, 90)]

    check_refused("batches come in more than 64 forms", batches=shapes, fits=({"epochs": 1},))


def test_graphs_that_are_switched_off() -> None:
    ran = fitted(False)
    assert "no CUDA graph: cuda_graphs=False" in ran.trainer.fast_path
    assert ran.trainer.fast_path.startswith("L1")
    assert not ran.replays


def test_a_device_that_updates_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed.Timed, "share", 0.5)
    auto = fitted("auto")
    check_same(auto, fitted(False))
    assert "the device is what updates wait for: the host takes 0.50 of its time" in auto.trainer.fast_path
    assert sum(fitted("require").replays)


class Counts(Trainer[Any]):
    def count(self, batch: Any) -> int:
        return len(batch[1])


class Updating(Trainer[Any]):
    def update(self, window: Any) -> Any:
        return super().update(window)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "a count of its own": ("a `count` of your own reads each batch", {"kind": Counts}),
    "an update of its own": ("an `update` of your own reads what it has done", {"kind": Updating}),
}


@pytest.mark.parametrize("run", RUNS)
def test_settings_under_which_nothing_is_recorded(run: str) -> None:
    reason, how = RUNS[run]
    check_refused(reason, **how)


def test_several_optimizers_are_recorded_together_or_refused() -> None:
    def two(parameters: Any) -> Any:
        each = list(parameters)
        halves = {"a": each[:2], "b": each[2:]}
        return {name: torch.optim.AdamW(half, lr=0.05, fused=True) for name, half in halves.items()}

    ran = both(optimizer=two, clip={"a": 0.1, "b": None}, schedule={"a": StepLR(Updates(4), 0.5)}, exact=False)
    assert ran.trainer.fast_path.startswith("L2")
    assert both(optimizer=two, clip={"a": 0.1}).trainer.fast_path.startswith("L3")


class OwnStep(torch.optim.SGD):
    """Makes its step by a number of the host."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1 / (1 + parameter.grad.abs().max().item()))


def test_a_step_of_ones_own_stays_beside_the_recording() -> None:
    ran = both(optimizer=lambda p: OwnStep(p, lr=0.1), nonfinite="ignore")
    assert ran.trainer.fast_path.startswith("L2")
