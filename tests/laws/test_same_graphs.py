"""Law Same: an update that is replayed is the one that the code makes, and that a loop by hand makes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from laws.graph_runs import Ran, alike, both, fitted
from laws.late_runs import OPTIMIZERS, data, net
from trainwright import MixedPrecision, OneCycle, StepLR, Updates

pytestmark = pytest.mark.slow

SCALE = 256.0
PRECISION: dict[str, Any] = {
    "fp32": None,
    "bf16": "bf16",
    "fp16": MixedPrecision("fp16", init_scale=SCALE, growth_interval=10**6),
}
SCHEDULES: dict[str, Any] = {
    "none": None,
    "steps": StepLR(Updates(3), gamma=0.5),
    "one cycle": OneCycle(max_lr=0.1, cycle_momentum=False),
    "momentum too": OneCycle(max_lr=0.1),
}
WINDOWS = {"each": (1, 4), "of four": (4, 4), "ragged": (4, 6)}
"""Micro-batches of a window, and epochs."""
CASES = [
    (*case, list(SCHEDULES)[(index + index // 4) % 4])
    for index, case in enumerate(product(("adamw", "sgd"), (None, 0.1), WINDOWS, PRECISION))
]


def batches(windows: str) -> list[Any]:
    return data()[:4] * 2 if windows == "of four" else data()


def by_hand(optimizer: str, clip: Any, windows: str, precision: str, schedule: str) -> tuple[Any, Any, list[float]]:
    """The weights, the states and the losses of a plain loop."""
    torch.manual_seed(3)
    model, (size, epochs), rows = net(norm=True), WINDOWS[windows], batches(windows)
    made = OPTIMIZERS[optimizer](model.parameters())
    grouped = [rows[at : at + size] for at in range(0, len(rows), size)]
    rates = rates_by_hand(made, schedule, epochs * len(grouped))
    scale, losses = SCALE if precision == "fp16" else 1.0, []
    for window in grouped * epochs:
        made.zero_grad()
        whole, total = sum(len(y) for _, y in window), 0.0
        for x, y in window:
            kind = torch.float16 if precision == "fp16" else torch.bfloat16
            with torch.autocast("cpu", kind, enabled=precision != "fp32"):
                loss = nn.functional.cross_entropy(model(x), y) * (len(y) / whole)
            (loss * scale).backward()
            total += loss.item()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / scale)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        losses.append(total)
        if rates is not None:
            rates.step()
    return model.state_dict(), made.state_dict()["state"], losses


def rates_by_hand(made: Any, schedule: str, updates: int) -> Any:
    if schedule == "none":
        return None
    if schedule == "steps":
        return torch.optim.lr_scheduler.StepLR(made, 3, gamma=0.5)
    cycles = schedule == "momentum too"
    return torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=updates, cycle_momentum=cycles)


def check(optimizer: str, clip: Any, windows: str, precision: str, schedule: str) -> Ran:
    """Captured, eager and by hand are the same."""
    if precision == "fp16" and schedule == "momentum too":
        schedule = "one cycle"  # which the host must not wait for
    size, epochs = WINDOWS[windows]
    on_device = schedule in ("steps", "one cycle")
    ran = both(
        model=lambda: net(norm=precision != "fp16"),
        optimizer=optimizer,
        batches=lambda: batches(windows),
        fits=({"epochs": epochs},),
        clip=clip,
        accumulate=size,
        precision=PRECISION[precision],
        schedule=SCHEDULES[schedule],
        exact=not on_device,
    )
    assert ran.trainer.fast_path.startswith("L2" if schedule == "momentum too" else "L3")
    return ran


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_captured_is_eager(case: tuple[Any, ...]) -> None:
    check(*case)


@pytest.mark.parametrize("case", [case for case in CASES if case[3] != "fp16"], ids=lambda c: "-".join(map(str, c)))
def test_captured_is_a_loop_by_hand(case: tuple[Any, ...]) -> None:
    size, epochs = WINDOWS[case[2]]
    ran = fitted(
        "require",
        model=lambda: net(norm=True),
        optimizer=case[0],
        batches=lambda: batches(case[2]),
        fits=({"epochs": epochs},),
        clip=case[1],
        accumulate=size,
        precision=PRECISION[case[3]],
        schedule=SCHEDULES[case[4]],
    )
    assert ran.error is None
    assert sum(ran.replays)
    weights, states, losses = by_hand(*case)
    exact = size == 1 and case[1] is None and case[4] in ("none", "momentum too")
    alike((ran.weights, ran.moments[0]), (weights, states), exact=exact)
    assert [record.loss for record in ran.records] == pytest.approx(losses, rel=1e-5)
