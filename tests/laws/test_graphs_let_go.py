"""What a run has recorded is given back when it ends; what is told of it stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from laws.emulated_graph import EmulatedGraph, emulate
from laws.late_runs import data, on_the_cpu, trained
from trainwright import Fast, accuracy
from trainwright.run.ledger import Ledger
from trainwright.run.recorded import Recorded
from trainwright.runtime.gradients import Gradients

pytestmark = pytest.mark.slow


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


class Mark:
    """A hook on a node of autograd, which lives as long as the node does."""

    def __call__(self, *_: Any) -> None:
        """Nothing."""


def leaves(node: Any) -> list[Any]:
    """The nodes behind this one that add to the gradients of weights."""
    found, left = dict[Any, None](), [node]
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found[one] = None
            left += [after for after, _ in one.next_functions]
    return [one for one in found if type(one).__name__ == "AccumulateGrad"]


@pytest.mark.parametrize("graphs", ["require", False])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("no_garbage")
def test_nothing_of_autograd_outlives_its_update(
    accumulate: int, precision: str | None, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes belong to the stream that they were made on: on CUDA a recording, on another one, would break."""
    on_the_cpu(monkeypatch)
    emulate(monkeypatch)
    marks, kept, looked = list[weakref.ref[Mark]](), list[Mark](), list[int]()
    zero, weigh = Gradients.zero, Ledger.weigh

    def begins(self: Gradients) -> None:
        looked.append(len(marks))
        kept.extend(mark for mark in (ref() for ref in marks) if mark is not None)
        marks.clear()
        zero(self)

    def weighed(self: Ledger, returned: Any) -> torch.Tensor:
        loss = weigh(self, returned)
        for node in leaves(loss.grad_fn):
            mark = Mark()
            node.register_prehook(mark)
            marks.append(weakref.ref(mark))
        return loss

    monkeypatch.setattr(Gradients, "zero", begins)
    monkeypatch.setattr(Ledger, "weigh", weighed)
    slots = {"accumulate": accumulate, "precision": precision, "metrics": {"accuracy": accuracy}, "clip": 1.0}
    trainer, _, error = trained(data(), fast=Fast(cuda_graphs=graphs), epochs=4, **slots)
    assert error is None
    assert trainer.fast_path.startswith("L3" if graphs else "L1")
    assert sum(looked) > 12
    assert kept == []
