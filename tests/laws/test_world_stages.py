"""World: a second `fit` goes on on several processes from what it would on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import EMA, SWA, OneCycle, Trainer, Updates, batches

from .world_runs import apart, flat, perceptron, rows_of_classes

EXACT = 1e-12
AVERAGES: dict[str, Any] = {"none": None, "ema": EMA(0.8), "swa": SWA(Updates(2), every=Updates(1))}


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*perceptron(5, 3)).double()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def stages(kind: str, writes: bool) -> dict[str, Any]:
    """Two stages; with `writes` somebody changes the weights between them, on the first process alone."""
    module = model()
    trainer = Trainer(
        module, sgd(module), nn.CrossEntropyLoss(), average=AVERAGES[kind], schedule=OneCycle(0.1), console=False
    )
    data = batches(rows_of_classes(13), 4, shuffle=True, seed=1)
    trainer.fit(data, epochs=2)
    shown = flat(module)
    if writes and trainer.is_main:
        with torch.no_grad():
            module[0].weight.mul_(0.5)
    result = trainer.fit(data, data, epochs=1)
    return {"weights": shown + flat(module), "history": result.history}


@pytest.mark.sample(2)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", AVERAGES)
def test_a_second_stage_trains_on_from_the_weights_of_the_first_process(kind: str, writes: bool) -> None:
    expected = stages(kind, writes)
    for outcome in pool(2).run(stages, kind, writes):
        assert apart(outcome, expected) <= EXACT


class Ending(Trainer[nn.Sequential]):
    """Ends the run by a word of its own, in the epoch that ends it anyway."""

    def end_epoch(self, metrics: dict[str, float]) -> None:
        self.stop("enough")


def ended() -> str:
    module = model()
    data = batches(rows_of_classes(13), 4)
    return Ending(module, sgd(module), nn.CrossEntropyLoss(), console=False).fit(data, epochs=1).stopped


def test_a_hook_says_why_a_run_ends_where_it_ends_anyway() -> None:
    assert [ended(), *pool(2).run(ended)] == 3 * ["enough"]
