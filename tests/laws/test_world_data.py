"""World: the order of the rows, streams of any length, and what noise and BatchNorm are on each process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed.pool import pool
from trainwright import MeanLoss, Trainer, batches
from trainwright.data import sharded
from trainwright.distributed.ddp import DDP

from .world_runs import apart, flat, perceptron, rows_of_classes

EXACT = 1e-12


def start(*extra: nn.Module) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(2)
    first, act, last = perceptron(5, 3)
    model = nn.Sequential(first, *extra, act, last).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return [one for part in parts for one in part]


class Seeing(Trainer[nn.Sequential]):
    """Keeps what each step was given, the random state before it, and what a noisy layer made of ones."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, console=False, **settings)
        self.seen: list[list[float]] = []
        self.states: list[bytes] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append(batch[0][:, 0].tolist())
        self.states.append(torch.get_rng_state().numpy().tobytes())
        return super().training_step(batch)


# The order.


def loaded(workers: int, shuffle: bool, seed: int | None) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows = TensorDataset(*rows_of_classes(29))
    context = "fork" if workers else None  # processes of the pool would spawn theirs, which takes long
    return DataLoader(
        rows, 8, shuffle=shuffle, num_workers=workers, generator=generator, multiprocessing_context=context
    )


def read(kind: str) -> dict[str, Any]:
    torch.manual_seed(4)
    data = {
        "own": lambda: batches(rows_of_classes(29), 8, shuffle=True, seed=7),
        "own, drawn": lambda: batches(rows_of_classes(29), 8, shuffle=True),
        "loader": lambda: loaded(0, True, 7),
        "loader of the global state": lambda: loaded(0, True, None),
        "workers": lambda: loaded(2, True, 7),
        "unshuffled": lambda: loaded(0, False, None),
        "arrays": lambda: TensorDataset(*rows_of_classes(29)),
    }[kind]()
    trainer = Seeing(*start(), nn.CrossEntropyLoss())
    size = {"batch_size": 8} if kind == "arrays" else {}
    trainer.fit(data, epochs=3, **size)
    return {"seen": trainer.seen, "weights": flat(trainer.model), "history": trainer.history}


def alone(kind: str) -> list[list[float]]:
    """The rows of every batch on one process, by torch's own loader, or where one process trains."""
    torch.manual_seed(4)
    trainer = Seeing(*start(), nn.CrossEntropyLoss())
    given = {"loader": (0, True, 7), "workers": (2, True, 7), "unshuffled": (0, False, None)}
    given["loader of the global state"] = (0, True, None)
    if kind in given:
        loader = loaded(*given[kind])
        return [x[:, 0].tolist() for _ in range(3) for x, _ in loader]
    data: Any = (
        TensorDataset(*rows_of_classes(29))
        if kind == "arrays"
        else batches(rows_of_classes(29), 8, shuffle=True, seed=7 if kind == "own" else None)
    )
    trainer.fit(data, epochs=3, **({"batch_size": 8} if kind == "arrays" else {}))
    return trainer.seen


KINDS = ("own", "own, drawn", "loader", "loader of the global state", "workers", "unshuffled", "arrays")


def check_order(run: Any, kind: str) -> None:
    """Slices laid end to end are the batches of one process, in each epoch; and the orders of epochs differ."""
    seen = [outcome["seen"] for outcome in run(read, kind)]
    expected = alone(kind)
    assert [joined(parts) for parts in zip(*seen, strict=True)] == expected
    shuffled = kind != "unshuffled"
    assert (expected[:4] != expected[4:8]) == shuffled
    assert (joined(expected[:4]) == rows_of_classes(29)[0][:, 0].tolist()) == (not shuffled)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slices_of_all_processes_are_the_batches_of_one(kind: str) -> None:
    check_order(pool(2).run, kind)


# Streams.

PARTS = {2: [(4, 3, 4, 2), (5, 1)], 3: [(4, 3, 4, 2, 2), (), (5, 1)]}
"""Rows of every batch that each process has of its own."""


def parts_of(size: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    cut = PARTS[size][rank]
    x, y = rows_of_classes(sum(cut), seed=10 + rank)
    y[1::4] = -100
    return list(zip(x.split(cut), y.split(cut), strict=True)) if cut else []


class Valid(Trainer[nn.Sequential]):
    """Its step says itself what its mean is over."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        valid = (y != -100).sum()
        return MeanLoss(F.cross_entropy(self.model(x), y, reduction="sum") / valid.clamp(min=1), valid)


def stream(accumulate: int, own_counts: bool) -> dict[str, Any]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, optimizer = start()
    kind = Valid if own_counts else Trainer
    loss = None if own_counts else nn.CrossEntropyLoss()
    trainer = kind(model, optimizer, loss, accumulate=accumulate, console=False)
    data = sharded(lambda epoch: iter(parts_of(size, rank)))
    result = trainer.fit(data, data, epochs=3)
    return {"weights": flat(model), "history": result.history, "updates": result.updates}


def check_stream(run: Any, size: int, accumulate: int, own_counts: bool) -> None:
    model, optimizer = start()
    parts = [parts_of(size, rank) for rank in range(size)]
    history, every = [], joined(parts)
    windows = range(0, max(map(len, parts)), accumulate)
    for epoch in range(3):
        total = count = 0.0
        for j in windows:
            x, y = map(torch.cat, zip(*joined(own[j : j + accumulate] for own in parts), strict=True))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            valid = int((y != -100).sum())
            total, count = total + loss.item() * valid, count + valid
        with torch.no_grad():
            x, y = map(torch.cat, zip(*every, strict=True))
            checked = F.cross_entropy(model(x), y).item()
        reported = {"epoch": epoch + 1, "update": (epoch + 1) * len(windows), "loss": total / count}
        history.append(reported | {"val_loss": checked, "lr": 0.2})
    for outcome in run(stream, accumulate, own_counts):
        assert outcome["updates"] == 3 * len(windows)
        assert apart(outcome, {"weights": flat(model), "history": history}) <= EXACT


@pytest.mark.parametrize("own_counts", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", PARTS)
def test_windows_of_streams_of_different_length_are_one_window(size: int, accumulate: int, own_counts: bool) -> None:
    check_stream(pool(size).run, size, accumulate, own_counts)


# Noise and BatchNorm.


def noisy(rows: int, same: bool) -> dict[str, Any]:
    torch.manual_seed(4)
    model, optimizer = start(nn.Dropout(0.5))
    trainer = Seeing(model, optimizer, nn.CrossEntropyLoss(), parallel=DDP(same_noise=same))
    trainer.fit(batches(rows_of_classes(rows), 8), epochs=2)
    return {"states": trainer.states, "seen": trainer.seen, "after": torch.get_rng_state().numpy().tobytes()}


def test_processes_draw_noise_of_their_own_and_go_on_alike() -> None:
    first, second = pool(2).run(noisy, 16, False)
    assert not set(first["states"]) & set(second["states"])
    assert first["after"] == second["after"]


def test_processes_may_draw_the_same_noise() -> None:
    first, second = pool(2).run(noisy, 16, True)
    assert first["states"] == second["states"]


def check_dummy(run: Any) -> None:
    """The last batch has one row: the second process runs it too, and draws on as if it had not."""
    first, second = run(noisy, 17, False)
    assert len(first["states"]) == 6 and second["seen"][2] == first["seen"][2]
    assert second["states"][2] == second["states"][3] != second["states"][1]
    assert first["states"][2] != first["states"][3]


def test_a_dummy_leaves_no_trace_in_the_noise() -> None:
    check_dummy(pool(2).run)


def normal(rows: int, sync: bool) -> dict[str, Any]:
    model, optimizer = start(nn.BatchNorm1d(8))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, parallel=DDP(sync_buffers=sync))
    result = trainer.fit(batches(rows_of_classes(rows), 8), batches(rows_of_classes(13, seed=5), 4), epochs=3)
    return {"weights": flat(model), "history": result.history}


def normal_by_hand(rows: int, size: int, sync: bool) -> dict[str, Any]:
    """Each slice is normalized by itself, with statistics of its process; those of the first are evaluated."""
    model, optimizer = start(nn.BatchNorm1d(8))
    own = [{name: value.clone() for name, value in model.named_buffers()} for _ in range(size)]
    x, y = rows_of_classes(rows)
    val_x, val_y = rows_of_classes(13, seed=5)
    history = []
    for epoch in range(3):
        total = 0.0
        for a, b in zip(x.split(8), y.split(8), strict=True):
            served = max(1, min(size, len(a) // 2))
            cuts = [len(a) * r // served for r in range(served + 1)]
            optimizer.zero_grad()
            for rank in range(served):
                mine = slice(cuts[rank], cuts[rank + 1])
                if sync:
                    own[rank] = {name: value.clone() for name, value in own[0].items()} if rank else own[0]
                output = functional_call(model, {**dict(model.named_parameters()), **own[rank]}, (a[mine],))
                loss = F.cross_entropy(output, b[mine], reduction="sum")
                (loss / len(a)).backward()
                total += loss.item()
            optimizer.step()
        with torch.no_grad():
            model.eval()
            output = functional_call(model, {**dict(model.named_parameters()), **own[0]}, (val_x,))
            model.train()
        reported = {"epoch": epoch + 1, "update": (epoch + 1) * -(-rows // 8), "loss": total / rows}
        history.append(reported | {"val_loss": F.cross_entropy(output, val_y).item(), "lr": 0.2})
    model.load_state_dict(own[0], strict=False)
    return {"weights": flat(model), "history": history}


def check_normal(run: Any, rows: int, size: int, sync: bool = False) -> None:
    expected = normal_by_hand(rows, size, sync)
    for outcome in run(normal, rows, sync):
        assert apart(outcome, expected) <= EXACT


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(24, 2), (19, 2), (19, 3), (21, 3)])
def test_slices_are_normalized_by_themselves_and_the_first_ones_statistics_count(
    rows: int, size: int, sync: bool
) -> None:
    check_normal(pool(size).run, rows, size, sync)
