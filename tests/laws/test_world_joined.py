"""World: where a process has no row of a batch or window, a dummy is neither trained on nor counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.pool import pool
from records import Records
from trainwright import Trainer, batches
from trainwright.data import sharded
from trainwright.distributed.ddp import DDP

from .world_runs import apart, flat, perceptron, rows_of_classes

EXACT = 1e-12
BATCH, EPOCHS = 4, 2


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(*perceptron(5, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def short(first: int) -> list[float]:
    """The reported losses where the first process's part of a stream has `first` batches, the other's three."""
    rank = torch.distributed.get_rank()
    x, y = rows_of_classes(6)
    part = [(x[j : j + 1], y[j : j + 1]) for j in (range(3, 6) if rank else range(first))]
    model, optimizer = start()
    seen = Records()
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), observers=[seen], console=False)
    trainer.fit(sharded(lambda epoch: iter(part)), epochs=1)
    return seen.losses


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_loss_is_reported_where_the_first_process_has_no_row(first: int) -> None:
    model, optimizer = start()
    x, y = rows_of_classes(6)
    reported = []
    for j in range(3):
        rows = [j, 3 + j] if j < first else [3 + j]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        reported.append(loss.item())
    assert pool(2).run(short, first)[0] == pytest.approx(reported, abs=1e-12)


class Minimizing(Trainer[nn.Module]):
    """A forward of its own, with layers in eval mode, before `minimize`."""

    def update(self, window: Any) -> None:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        self.minimize(F.cross_entropy(self.model(x), y))


def synced(kind: type[Trainer[nn.Module]]) -> dict[str, Any]:
    torch.manual_seed(2)
    first, act, last = perceptron(5, 3)
    model = nn.Sequential(first, nn.BatchNorm1d(8).eval(), act, last).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kind(model, optimizer, nn.CrossEntropyLoss(), parallel=DDP(sync_buffers=True), console=False)
    result = trainer.fit(batches(rows_of_classes(13), BATCH), epochs=2)
    return {"weights": flat(model), "history": result.history}


def test_buffers_are_brought_together_before_a_forward_of_ones_own() -> None:
    expected = synced(Trainer)
    for outcome in pool(2).run(synced, Minimizing):
        assert apart(outcome, expected) <= EXACT


def uneven(static: bool) -> dict[str, Any]:
    """A stream of which the first process has one micro-batch of two in the first window, and the other two."""
    group = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if group else 0
    model, optimizer = start()
    x, y = rows_of_classes(10)
    mine = [[0, 1], [4, 5], [6, 7], [8, 9]] if rank else [[2, 3]]
    whole = [[0, 1], [2, 3, 4, 5], [6, 7], [8, 9]]
    part = [(x[rows], y[rows]) for rows in (mine if group else whole)]
    settings: dict[str, Any] = {"parallel": DDP(static_graph=static), "accumulate": 2, "console": False}
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), **settings)
    result = trainer.fit(sharded(lambda epoch: iter(part)), epochs=2)
    return {"weights": flat(model), "history": result.history}


@pytest.mark.parametrize("static", [False, True])
def test_parts_of_a_stream_of_other_lengths_make_one_window(static: bool) -> None:
    expected = uneven(False)
    for outcome in pool(2).run(uneven, static):
        assert apart(outcome, expected) <= EXACT


class Written(Trainer[nn.Module]):
    """A backward by hand."""

    def update(self, window: Any) -> Any:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.apply_gradients()
        return loss


def broken(kind: type[Trainer[nn.Module]], settings: dict[str, Any]) -> dict[str, Any]:
    """A stream whose part on the first process ends with a row that holds a NaN; its update is skipped, no other."""
    group = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if group else 0
    model, optimizer = start()
    x, y = rows_of_classes(10)
    x[5] = torch.nan
    mine = [[0, 1], [2, 3], [6, 7], [8, 9]] if rank else [[4], [5]]
    whole = [[4, 0, 1], [5, 2, 3], [6, 7], [8, 9]]
    part = [(x[rows], y[rows]) for rows in (mine if group else whole)]
    trainer = kind(model, optimizer, nn.CrossEntropyLoss(), on_nonfinite="skip", console=False, **settings)
    result = trainer.fit(sharded(lambda epoch: iter(part)), epochs=2)
    return {"weights": flat(model), "history": [{"skipped": result.skipped, "updates": result.updates}]}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"parallel": DDP(find_unused_parameters=True)}], ids=["auto", "unused"])
@pytest.mark.parametrize("kind", [Trainer, Minimizing, Written])
def test_a_nan_in_rows_that_stand_in_reaches_no_gradient(
    kind: type[Trainer[nn.Module]], settings: dict[str, Any]
) -> None:
    expected = broken(kind, settings)
    assert expected["history"] == [{"skipped": 2, "updates": 6}]
    for outcome in pool(2).run(broken, kind, settings):
        assert apart(outcome, expected) <= EXACT
