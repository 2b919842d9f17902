"""Law Same on a real GPU: updates that are checked later are those checked at once, and the loop that people write."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gpu_runs import (
    SIZE,
    Case,
    by_hand,
    cases,
    checked_at_once,
    conv_net,
    data_of,
    distance,
    fitted,
    losses,
    make,
    moved,
    net,
    noisy_net,
    path_of,
    rows,
    same,
    state_of,
    tensors,
    trained,
    watch_of,
)
from torch import nn

from trainwright import EMA, SWA, Trainer, Updates, accuracy, batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
]

CLOSE = {None: 1e-5, "bf16": 1e-3, "fp16": 1e-3}
"""Of the largest weight, after 50 updates, by precision.

Rates lie on the device as float32, and clipping is folded into the step, which moves last bits of the weights. Under
autocast such a weight rounds to its neighbor now and then, 2^-8 away in bf16, which the gradients after it see: up to
1.2e-4 on the CPU, where a rate that is left as it was moves the weights by 1e-2.
"""


def three_ways(case: Case, device: torch.device, **settings: Any) -> tuple[nn.Module, Any, Any]:
    """The model of the loop by hand, and the trainers of runs that are checked at once and later."""
    given = {key: value for key, value in settings.items() if key in ("updates", "build", "data")}
    by = by_hand(case, device, **given)
    with checked_at_once():
        at_once = trained(case, device, **settings)
    return by, at_once, trained(case, device, **settings)


def check_three(case: Case, runs: tuple[nn.Module, Any, Any], *, build: Any = net) -> None:
    """They have trained, nothing was held back, and they have the same weights and losses."""
    by, at_once, later = runs
    assert moved(by, build)
    assert at_once.result.skipped == later.result.skipped == 0
    assert distance(by, at_once.model) <= CLOSE[case.precision]
    assert distance(at_once.model, later.model) <= CLOSE[case.precision]
    assert losses(later) == pytest.approx(losses(at_once), rel=1e-2 if case.precision else 1e-4)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_deferred_check_is_an_immediate_one_is_the_loop_by_hand(case: Case, device: torch.device) -> None:
    by, at_once, later = three_ways(case, device)
    check_three(case, (by, at_once, later))
    assert path_of(at_once).startswith("L0")
    assert path_of(later).startswith(case.level)
    if case.level == "L0":
        assert same(state_of(at_once), state_of(later))


NOISY = {"rows": (noisy_net, (20,)), "images": (conv_net, (3, 8, 8))}


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("micro_batches", ["one", "four"])
@pytest.mark.parametrize("kind", NOISY)
def test_dropout_and_batchnorm_advance_as_in_the_loop_by_hand(
    kind: str, micro_batches: str, precision: str | None, device: torch.device
) -> None:
    case = Case("adamw", 0.25, micro_batches, precision, "cycled" if kind == "rows" else "step")
    if precision == "fp16":
        case = Case("adamw", 0.25, micro_batches, precision)  # statistics are put back where an update is held back
    noises, counted = noises_of(case, kind, device)
    assert all(torch.equal(noise, noises[0]) for noise in noises)
    assert counted == [[50 * case.micro_batches] * 2] * 2


def noises_of(case: Case, kind: str, device: torch.device, *, updates: int = 50) -> tuple[list[Any], list[Any]]:
    """What the device draws after each way of training, and how many batches each BatchNorm has counted."""
    build, shape = NOISY[kind]
    data = data_of(case, shape)
    noises, counted, models = [], [], []
    for way in ("hand", "ours"):
        settings = {"updates": updates, "build": build, "data": data}
        made = by_hand(case, device, **settings) if way == "hand" else trained(case, device, **settings)
        models.append(made if way == "hand" else made.model)
        noises.append(torch.rand(8, device=device).cpu())
        norms = [one for one in models[-1].modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
        counted.append([int(one.num_batches_tracked) for one in norms])
    for model in models[1:]:
        assert distance(models[0], model) <= CLOSE[case.precision]
        for ours, theirs in zip(model.buffers(), models[0].buffers(), strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3)
    return noises, counted


SLOTS: dict[str, dict[str, Any]] = {
    "average": {"average": EMA(0.9)},
    "late average": {"average": SWA(start=Updates(10), every=Updates(5))},
    "metrics": {"metrics": {"accuracy": accuracy}},
    "ignored": {"on_nonfinite": "ignore"},
    "skipped": {"on_nonfinite": "skip"},
}


@pytest.mark.parametrize("slots", SLOTS)
def test_evaluations_between_updates_see_the_weights_of_their_time(slots: str, device: torch.device) -> None:
    at_once, later = evaluated(slots, device)
    assert len(at_once.history) >= 5
    assert distance(at_once.model, later.model) <= 1e-5
    for ours, theirs in zip(later.history, at_once.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert path_of(later).startswith("L1")


def evaluated(slots: str, device: torch.device, *, updates: int = 50) -> tuple[Any, Any]:
    """Runs checked at once and later that validate each seven updates, and predict when they are over."""
    case = Case("adamw", 0.25, "four", None, "step")
    runs = []
    for check in (checked_at_once, nullcontext):
        trainer = make(case, device, **SLOTS[slots])
        with check():
            fitted(trainer, data_of(case), batches(rows(40, seed=3), SIZE), updates=updates, validate=Updates(7))
        before = tensors(trainer.model)
        outputs = trainer.predict(batches(rows(40, seed=3), SIZE))
        assert torch.isfinite(outputs).all()
        assert same(before, tensors(trainer.model))
        runs.append(trainer)
    return runs[0], runs[1]


class Own(Trainer[nn.Module]):
    """A step that logs a number, of which each update has another."""

    def training_step(self, batch: Any) -> Any:
        inputs, target = batch
        output = self.model(inputs)
        self.log("spread", output.std())
        return nn.functional.cross_entropy(output, target)


def test_what_a_step_logs_is_in_the_record_of_its_update(device: torch.device) -> None:
    case, logged = Case("adamw", 0.25, "four", None, "step"), []
    for check in (checked_at_once, nullcontext):
        with check():
            logged.append([one.values["spread"] for one in watch_of(trained(case, device, kind=Own)).records])
    assert len(set(logged[0])) == len(logged[0]) == 50
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)


class Changes(Trainer[nn.Module]):
    """Changes settings of the optimizer, and what is trained, between two epochs."""

    def begin_epoch(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * epoch
            if epoch == 2 and "betas" in group:
                group["betas"] = (0.8, 0.95)
            elif epoch == 2:
                group["momentum"] = 0.5
        self.model[0].bias.requires_grad_(epoch != 3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_is_changed_between_epochs_reaches_the_updates_after(optimizer: str, device: torch.device) -> None:
    case = Case(optimizer, 0.25, "one", None, "step")
    plain = trained(case, device)
    with checked_at_once():
        at_once = trained(case, device, kind=Changes)
    later = trained(case, device, kind=Changes)
    assert distance(plain.model, at_once.model) > 1e-3
    assert distance(at_once.model, later.model) <= 1e-5
