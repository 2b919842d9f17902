"""Nothing of autograd outlives its update, also where the numbers of updates are read later."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from laws.deferred_runs import data, defer_on_cpu, trained
from trainwright import accuracy
from trainwright.optim.gradients import Gradients
from trainwright.update.loss_tracker import BackwardArgs, LossTracker


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


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("no_garbage")
def test_nothing_of_autograd_outlives_its_update(
    accumulate: int, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    defer_on_cpu(monkeypatch)
    marks, kept, looked = list[weakref.ref[Mark]](), list[Mark](), list[int]()
    zero, backward_args = Gradients.zero, LossTracker.backward_args

    def begins(self: Gradients) -> None:
        looked.append(len(marks))
        kept.extend(mark for mark in (ref() for ref in marks) if mark is not None)
        marks.clear()
        zero(self)

    def marked(self: LossTracker, returned: Any) -> BackwardArgs:
        args = backward_args(self, returned)
        for node in leaves(args[0][0].grad_fn):
            mark = Mark()
            node.register_prehook(mark)
            marks.append(weakref.ref(mark))
        return args

    monkeypatch.setattr(Gradients, "zero", begins)
    monkeypatch.setattr(LossTracker, "backward_args", marked)
    slots = {"accumulate": accumulate, "precision": precision, "metrics": {"accuracy": accuracy}, "clip": 1.0}
    trainer, _, error = trained(data(), epochs=4, **slots)
    assert error is None
    assert trainer.fast_path.startswith("L1")
    assert sum(looked) > 12
    assert kept == []
