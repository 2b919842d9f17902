"""What a run has recorded is given back when it ends; what is told of it stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from laws.emulated_graph import EmulatedGraph, emulate
from laws.late_runs import data, on_the_cpu, trained
from trainwright import Fast
from trainwright.run.recorded import Recorded


def test_the_memory_of_recordings_is_free_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    emulate(monkeypatch)
    real, recorded = Recorded.attach, list[torch.Tensor | None]()

    def attach(self: Recorded) -> None:
        recorded.extend(gradient for _, gradient in self._gradients)
        real(self)

    monkeypatch.setattr(Recorded, "attach", attach)
    trainer, _, error = trained(data(), fast=Fast(cuda_graphs="require"), epochs=4)
    assert error is None
    graphs = [weakref.ref(graph) for graph in EmulatedGraph.made]
    assert graphs
    EmulatedGraph.made.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * len(graphs)
    assert trainer.fast_path.startswith("L3, ")
    assert "2 recorded" in trainer.fast_path
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert not any(gradient is one for gradient in gradients for one in recorded), "theirs is another memory"
