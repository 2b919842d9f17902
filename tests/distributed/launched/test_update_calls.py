"""The Python calls of one update on two ranks beside those of a DDP loop by hand: counted, on any machine the same."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.pool import Pool
from trainwright import DDP, Trainer, batches

MOST_EXTRA_CALLS = 15
BATCH = 8
Rows = tuple[Tensor, Tensor]


def calls(function: Callable[[], Any]) -> Counter[str]:
    """Return the Python functions called while `function` runs, by file and name."""
    counted: Counter[str] = Counter()
    gc.collect()
    gc.disable()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counted[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def by_hand(data: Rows) -> Counter[str]:
    model, optimizer = model_and_optimizer()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    criterion = nn.CrossEntropyLoss()

    def loop() -> None:
        for start in range(0, len(data[0]), BATCH):
            inputs, target = (field[start : start + BATCH // 2].clone() for field in data)
            optimizer.zero_grad()
            loss = criterion(ddp(inputs), target)
            loss.backward()
            optimizer.step()

    return calls(loop)


def by_trainer(data: Rows) -> Counter[str]:
    parallel = DDP(find_unused_parameters=False)
    trainer = Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), console=False, parallel=parallel)
    return calls(lambda: trainer.fit(batches(data, BATCH), epochs=1))


def per_update(run: Callable[[Rows], Counter[str]]) -> Counter[str]:
    """Return the calls that one more update costs; those of an exchange, about once a second, round to 0."""
    counts = []
    for updates in (2, 20, 60):
        counts.append(run((torch.randn(BATCH * updates, 4), torch.randint(3, (BATCH * updates,)))))
    _, few, many = counts
    return Counter({name: n for name in many if (n := round((many[name] - few[name]) / 40))})


def counted_both() -> tuple[Counter[str], Counter[str]]:
    return per_update(by_hand), per_update(by_trainer)


@pytest.mark.slow
def test_an_update_of_two_ranks_makes_few_calls_more_than_a_ddp_loop_by_hand(ranks2: Pool) -> None:
    for loop, fit in ranks2.run(counted_both):
        assert sum(fit.values()) - sum(loop.values()) <= MOST_EXTRA_CALLS, (fit - loop).most_common()
        assert any("distributed_check" in name for name in fit)
