"""World: a batch without a row is on several processes what it is on one: left out or refused, not divided by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distributed.pool import pool
from records import Records
from trainwright import NonFiniteError, SumLoss, Trainer
from trainwright.data import sharded

from .world_runs import flat, rows_of_classes

EXACT = 1e-12
SIZES = (8, 0, 0, 7)


def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data() -> list[tuple[Tensor, Tensor]]:
    x, y = rows_of_classes(sum(SIZES))
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


class Plain(Trainer[nn.Linear]):
    """A loss that is a plain sum."""

    def training_step(self, batch: Any) -> Any:
        return SumLoss(F.cross_entropy(self.model(batch[0]), batch[1], reduction="sum"))


class PlainUpdate(Trainer[nn.Linear]):
    """The same in an update of its own: a sum over nothing is 0."""

    def update(self, window: Any) -> None:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        self.minimize(SumLoss(F.cross_entropy(self.model(x), y, reduction="sum")))


class ByHand(Trainer[nn.Linear]):
    """A backward by hand, of a loss that holds something beside the rows."""

    def update(self, window: Any) -> Any:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        self.optimizer.zero_grad()
        loss = held_small(self.model, x, y)
        loss.backward()
        self.apply_gradients()
        return loss


class Closing(ByHand):
    """The same by a closure."""

    def update(self, window: Any) -> None:
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = held_small(self.model, x, y)
            loss.backward()
            return loss

        self.apply_gradients(closure=closure)


def held_small(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    penalty: Tensor = 0.1 * model.weight.square().sum()
    return F.cross_entropy(model(x), y, reduction="sum") / max(1, len(x)) + penalty


KINDS: dict[str, type[Trainer[Any]]] = {
    "default": Trainer,
    "plain": Plain,
    "plain update": PlainUpdate,
    "by hand": ByHand,
    "closing": Closing,
}


def train(kind: str, accumulate: int, policy: str = "skip") -> dict[str, Any]:
    model, optimizer = start()
    loss = nn.CrossEntropyLoss() if kind == "default" else None
    settings = {"accumulate": accumulate, "on_nonfinite": policy, "console": False}
    trainer = KINDS[kind](model, optimizer, loss, **settings)
    error = ""
    try:
        trainer.fit(data(), epochs=2)
    except NonFiniteError as raised:
        error = str(raised).partition("\n")[0]
    result = trainer.result
    assert result is not None
    counts = (result.updates, result.skipped, trainer.progress.rows)
    return {"weights": flat(model), "counts": counts, "error": error}


def by_hand(kind: str, accumulate: int) -> tuple[list[float], tuple[int, int, int]]:
    model, optimizer = start()
    updates = skipped = rows = 0
    for _ in range(2):
        for i in range(0, len(SIZES), accumulate):
            x, y = map(torch.cat, zip(*data()[i : i + accumulate], strict=True))
            rows += len(x)
            if not len(x) and kind in ("default", "plain"):
                skipped += 1
                continue
            optimizer.zero_grad()
            if kind in ("by hand", "closing"):
                loss = held_small(model, x, y)
            else:
                loss = F.cross_entropy(model(x), y, reduction="mean" if kind == "default" else "sum")
            loss.backward()
            optimizer.step()
            updates += 1
    return flat(model), (updates, skipped, rows)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_row_is_what_it_is_on_one_process(kind: str, accumulate: int) -> None:
    weights, counts = by_hand(kind, accumulate)
    alone, *outcomes = train(kind, accumulate), *pool(2).run(train, kind, accumulate)
    for outcome in (alone, *outcomes):
        assert outcome["counts"] == counts
        assert max(abs(a - b) for a, b in zip(outcome["weights"], weights, strict=True)) <= EXACT


@pytest.mark.parametrize("kind", ["default", "plain"])
def test_a_mean_over_no_row_is_refused_on_all_processes(kind: str) -> None:
    alone, *outcomes = train(kind, 1, "raise"), *pool(2).run(train, kind, 1, "raise")
    assert alone["error"].startswith("update 2: the loss is not finite")
    assert [outcome["error"] for outcome in outcomes] == 2 * [alone["error"]]
    assert [outcome["counts"] for outcome in outcomes] == 2 * [alone["counts"]]


PARTS = {0: ((0, 4), (8, 8), (8, 8), (8, 15)), 1: ((4, 8),)}
"""By process: which rows are in each batch of its stream."""


def stream(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = rows_of_classes(sum(SIZES))
    for begin, end in PARTS[rank]:
        yield x[begin:end], y[begin:end]


def train_on_a_stream(kind: str) -> dict[str, Any]:
    model, optimizer = start()
    loss = nn.CrossEntropyLoss() if kind == "default" else None
    trainer = KINDS[kind](model, optimizer, loss, on_nonfinite="skip", console=False)
    rank = trainer.world.rank
    result = trainer.fit(sharded(lambda epoch: stream(rank)), epochs=2)
    return {"weights": flat(model), "counts": (result.updates, result.skipped, trainer.progress.rows)}


@pytest.mark.parametrize("kind", ["default", "by hand"])
def test_a_stream_goes_on_after_a_window_without_a_row(kind: str) -> None:
    weights, counts = by_hand(kind, 1)
    for outcome in pool(2).run(train_on_a_stream, kind):
        assert outcome["counts"] == counts
        assert max(abs(a - b) for a, b in zip(outcome["weights"], weights, strict=True)) <= EXACT


# Numbers over nothing.


class Logging(Trainer[nn.Linear]):
    """Logs a mean over some rows, with their number: NaN over none."""

    on_device = False

    def training_step(self, batch: Any) -> Any:
        some = batch[0][:, 0][batch[0][:, 0] > 0]
        self.log("above", some.mean(), torch.tensor(len(some)) if self.on_device else len(some))
        return F.cross_entropy(self.model(batch[0]), batch[1])


def rows_above() -> tuple[Tensor, Tensor]:
    """Of three batches of 8 the first has rows above 0 in its first half, the second in its last, the third none."""
    x, y = rows_of_classes(24)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, -1.0], dtype=x.dtype).repeat_interleave(4)
    x[:, 0] = x[:, 0].abs() * signs
    return x, y


def log(on_device: bool) -> tuple[list[float], float]:
    received, (x, y) = Records(), rows_above()
    trainer = Logging(*start(), observers=[received], console=False)
    trainer.on_device = on_device
    result = trainer.fit(list(zip(x.split(8), y.split(8), strict=True)), epochs=1)
    return [update.values["above"] for update in received.updates], result.history[0]["above"]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_number_that_is_logged_with_a_count_of_0_weighs_nothing_and_is_nan_over_nothing(on_device: bool) -> None:
    first = rows_above()[0][:, 0]
    means = [first[:4].mean().item(), first[12:16].mean().item()]
    (reported, mean), (nothing, mean_there) = pool(2).run(log, on_device)
    assert reported[:2] == pytest.approx(means, abs=EXACT) and math.isnan(reported[2]) and nothing == []
    assert mean == mean_there == pytest.approx(sum(means) / 2, abs=EXACT)
