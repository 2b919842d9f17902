"""Law Same: where each update is read before its step, forward and backward alone are replayed, to the same end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laws.emulated_graph import EmulatedGraph, emulate
from laws.late_runs import OPTIMIZERS, data, on_the_cpu, same, state, trained
from trainwright import EMA, Fast, MixedPrecision, OneCycle

pytestmark = pytest.mark.slow

LOW = MixedPrecision("fp16", init_scale=2.0**8, growth_interval=12)
"""A scale that is raised once in a run or twice, and then must not be the one that was recorded."""
CASES: dict[str, dict[str, Any]] = {
    "fp16 with cycled momentum": {"precision": LOW, "schedule": OneCycle(max_lr=0.1)},
    "fp16 with an average": {"precision": LOW, "average": EMA(0.9)},
    "an optimizer that is not fused": {"optimizer": "not fused"},
    "windows, clipped": {"optimizer": "not fused", "accumulate": 2, "clip": 0.1},
    "skip with an average": {"nonfinite": "skip", "average": EMA(0.9)},
}


def both(monkeypatch: pytest.MonkeyPatch, batches: Any, **slots: Any) -> Any:
    monkeypatch.setitem(OPTIMIZERS, "not fused", lambda p: torch.optim.AdamW(p, lr=0.05))
    on_the_cpu(monkeypatch)
    emulate(monkeypatch)
    eager = trained(batches, fast=Fast(cuda_graphs=False), epochs=6, **slots)
    assert not EmulatedGraph.made
    return eager, trained(batches, fast=Fast(cuda_graphs="require"), epochs=6, **slots)


@pytest.mark.parametrize("case", CASES)
def test_replayed_is_eager_where_each_update_is_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (eager, told, _), (captured, told_too, error) = both(monkeypatch, data(), **CASES[case])
    assert error is None
    assert captured.fast_path.startswith("L2, ")
    assert sum(graph.replays for graph in EmulatedGraph.made) > 5
    assert same(state(eager), state(captured))
    assert told.records == told_too.records
    assert eager.history == captured.history


def test_a_loss_that_is_not_finite_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(x.clone(), y) for x, y in data() * 2]
    batches[9][0][1, 2] = float("nan")
    (eager, _, error), (captured, _, other) = both(monkeypatch, batches, optimizer="not fused")
    assert type(error) is type(other)
    assert str(error) == str(other)
    assert "update 10" in str(error)
    assert same(state(eager), state(captured))


@pytest.mark.parametrize("compares", [True, False])
def test_what_was_recorded_at_another_scale_is_recorded_anew(compares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.run.graphed import Graphed

    if not compares:  # the fault: an old scale gives right gradients, as long as it does not overflow
        monkeypatch.setattr(Graphed, "_settings", lambda self: [])
    _, (_, _, error) = both(monkeypatch, data(), **CASES["fp16 with an average"])
    assert error is None
    assert (len(EmulatedGraph.made) > 2) is compares
