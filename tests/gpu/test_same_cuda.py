"""Law Same on a real GPU: captured updates are the eager ones, and both those of the loop that people write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runs import (
    SIZE,
    Case,
    by_hand,
    cases,
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
autocast such a weight rounds to its neighbour now and then, 2^-8 away in bf16, which the gradients after it see: up to
1.2e-4 on the CPU, where a rate that is left as it was moves the weights by 1e-2.
"""


def three_ways(case: Case, device: torch.device, **settings: Any) -> tuple[nn.Module, Any, Any]:
    """The model of the loop by hand, the trainer of the eager run, and that of the captured one."""
    given = {key: value for key, value in settings.items() if key in ("updates", "build", "data")}
    by = by_hand(case, device, **given)
    return by, trained(case, device, **settings), trained(case, device, graphs="require", **settings)


def check_three(case: Case, runs: tuple[nn.Module, Any, Any], *, build: Any = net) -> None:
    """They have trained, nothing was held back, and they have the same weights and losses."""
    by, eager, captured = runs
    assert moved(by, build)
    assert eager.result.skipped == captured.result.skipped == 0
    assert distance(by, eager.model) <= CLOSE[case.precision]
    assert distance(eager.model, captured.model) <= CLOSE[case.precision]
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-2 if case.precision else 1e-4)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_captured_is_eager_is_the_loop_by_hand(case: Case, device: torch.device) -> None:
    by, eager, captured = three_ways(case, device)
    check_three(case, (by, eager, captured))
    assert path_of(eager).startswith(case.level_without)
    assert path_of(captured).startswith(case.level)
    if case.level != "L3":  # its steps are the eager ones
        assert same(state_of(eager), state_of(captured))


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
    assert counted == [[50 * case.micro_batches] * 2] * 3


def noises_of(case: Case, kind: str, device: torch.device, *, updates: int = 50) -> tuple[list[Any], list[Any]]:
    """What the device draws after each way of training, and how many batches each BatchNorm has counted."""
    build, shape = NOISY[kind]
    data = data_of(case, shape)
    noises, counted, models = [], [], []
    for way in ("hand", False, "require" if case.precision != "fp16" else "auto"):
        settings = {"updates": updates, "build": build, "data": data}
        made = by_hand(case, device, **settings) if way == "hand" else trained(case, device, graphs=way, **settings)
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
    "ignored": {"nonfinite": "ignore"},
    "skipped": {"nonfinite": "skip"},
}


@pytest.mark.parametrize("slots", SLOTS)
def test_evaluations_between_replays_see_the_weights_of_their_time(slots: str, device: torch.device) -> None:
    eager, captured = evaluated(slots, device)
    assert len(eager.history) >= 5
    assert distance(eager.model, captured.model) <= 1e-5
    for ours, theirs in zip(captured.history, eager.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert path_of(captured).startswith("L3")


def evaluated(slots: str, device: torch.device, *, updates: int = 50) -> tuple[Any, Any]:
    """An eager and a captured run that validate each seven updates, and predict when they are over."""
    case = Case("adamw", 0.25, "four", None, "step")
    runs = []
    for graphs in (False, "require"):
        trainer = make(case, device, graphs=graphs, **SLOTS[slots])
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


def test_what_a_step_logs_is_told_for_each_replay(device: torch.device) -> None:
    case = Case("adamw", 0.25, "four", None, "step")
    told = [
        [record.values["spread"] for record in watch_of(trained(case, device, graphs=graphs, kind=Own)).records]
        for graphs in (False, "auto")
    ]
    assert len(set(told[0])) == len(told[0]) == 50
    assert told[1] == pytest.approx(told[0], rel=1e-4)


class Changes(Trainer[nn.Module]):
    """Changes what a recording has baked in, between two epochs."""

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
    eager = trained(case, device, kind=Changes)
    captured = trained(case, device, kind=Changes, graphs="auto")
    assert distance(plain.model, eager.model) > 1e-3
    assert distance(eager.model, captured.model) <= 1e-5


def test_batches_of_several_shapes_are_each_trained_on(device: torch.device) -> None:
    case = Case("adamw", 0.25, "one", None, "step")
    data = shapes()
    runs = [trained(case, device, graphs=graphs, data=data, updates=60) for graphs in (False, "require")]
    assert distance(runs[0].model, runs[1].model) <= 1e-5
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-4)


def test_recordings_of_several_shapes_draw_from_one_stream_of_random_numbers(device: torch.device) -> None:
    case = Case("adamw", 0.25, "one", None, "step")
    noises, models = [], []
    for graphs in (False, "require"):
        models.append(trained(case, device, graphs=graphs, data=shapes(), build=noisy_net, updates=60).model)
        noises.append(torch.rand(8, device=device).cpu())
    assert torch.equal(*noises)
    assert distance(*models) <= 1e-5


def shapes() -> list[Any]:
    """Batches of 16, 16 and 24 rows in turn, and at the end one of 5."""
    x, y = rows(4 * 56 + 5)
    sizes = [16, 16, 24] * 4 + [5]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
