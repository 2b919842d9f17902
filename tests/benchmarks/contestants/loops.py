"""The loops people write by hand: the textbook's, the same with the fused optimizer, and the tuned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from contestants.entry import Contestant
from contestants.tasks import Clock, Drawn, Task


def train_plain(task: Task, clock: Clock) -> nn.Module:
    return loop(task, clock, task.loader())


def train_plain_other(task: Task, clock: Clock) -> nn.Module:
    return loop(task, clock, task.other_loader())


def train_textbook(task: Task, clock: Clock) -> nn.Module:
    return loop(task, clock, task.loader(), fused=False)


def loop(task: Task, clock: Clock, data: Iterable[Any], *, fused: bool = True) -> nn.Module:
    """The loop of the textbooks over anything that gives the next epoch's batches at each pass."""
    model = task.model()
    optimizer = task.optimizer(model, fused=fused)
    run = _accumulating if task.full else _simple
    run(task, clock, data, model, optimizer)
    return model


def _simple(task: Task, clock: Clock, data: Iterable[Any], model: nn.Module, optimizer: Any) -> None:
    criterion = task.criterion()
    model.train()
    for _ in range(1 + task.epochs):
        total, rows = 0.0, 0
        for inputs, target in data:
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
            rows += len(inputs)
        print(f"loss {total / rows:.4f}")
        clock.epoch_ended()


def _accumulating(task: Task, clock: Clock, data: Iterable[Any], model: nn.Module, optimizer: Any) -> None:
    criterion, scheduler = task.criterion(), task.scheduler(optimizer)
    assert scheduler is not None
    model.train()
    for _ in range(1 + task.epochs):
        total, rows = 0.0, 0
        optimizer.zero_grad()
        for number, (inputs, target) in enumerate(data, 1):
            loss = criterion(model(inputs), target)
            (loss / task.accumulate).backward()
            total += loss.item() * len(inputs)
            rows += len(inputs)
            if number % task.accumulate == 0:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"loss {total / rows:.4f}")
        clock.epoch_ended()


def train_tuned(task: Task, clock: Clock) -> nn.Module:
    """Batches by `index_select`, in an order drawn as the loader does; losses stay tensors."""
    model, drawn = task.model(), Drawn(task)
    optimizer, criterion = task.optimizer(model), task.criterion()
    scheduler, parameters = task.scheduler(optimizer), list(model.parameters())
    inputs, targets, size, accumulate = task.inputs, task.targets, task.size, task.accumulate
    model.train()
    for _ in range(1 + task.epochs):
        order, losses = drawn.order(), []
        if scheduler is None:
            for picked in order.split(size):
                optimizer.zero_grad(set_to_none=True)
                loss = criterion(model(inputs.index_select(0, picked)), targets.index_select(0, picked))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        else:
            for number, picked in enumerate(order.split(size), 1):
                loss = criterion(model(inputs.index_select(0, picked)), targets.index_select(0, picked))
                (loss / accumulate).backward()
                losses.append(loss.detach())
                if number % accumulate == 0:
                    clip_grad_norm_(parameters, 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad(set_to_none=True)
        print(f"loss {torch.stack(losses).mean().item():.4f}")
        clock.epoch_ended()
    return model


def evaluation_plain(task: Task) -> Callable[[], float]:
    return evaluation(task.model(), task.held_out(), task.criterion())


def evaluation_plain_other(task: Task) -> Callable[[], float]:
    return evaluation(task.model(), task.other_held_out(), task.criterion())


def evaluation(model: nn.Module, data: Iterable[Any], criterion: nn.Module) -> Callable[[], float]:
    """One pass as guides write it, whoever has prepared model and data."""

    def once() -> float:
        model.eval()
        total, rows = 0.0, 0
        with torch.no_grad():
            for inputs, target in data:
                total += criterion(model(inputs), target).item() * len(inputs)
                rows += len(inputs)
        model.train()
        return total / rows

    return once


def evaluation_tuned(task: Task) -> Callable[[], float]:
    """Views of the data, sums as tensors, one read at the end."""
    model, inputs, targets, size = task.model(), task.inputs, task.targets, task.size

    def once() -> float:
        model.eval()
        losses = []
        with torch.no_grad():
            for batch, target in zip(inputs.split(size), targets.split(size), strict=True):
                losses.append(F.cross_entropy(model(batch), target, reduction="sum"))
        model.train()
        return torch.stack(losses).sum(dtype=torch.float64).item() / targets.numel()

    return once


CONTESTANTS = [
    Contestant("plain", train_plain, evaluation_plain, note="DataLoader over a TensorDataset, fused AdamW"),
    Contestant("tuned", train_tuned, evaluation_tuned, order=Drawn, note="index_select, losses kept as tensors"),
    Contestant("plain-other", train_plain_other, evaluation_plain_other, note="DataLoader over a Dataset of one's own"),
    Contestant("textbook", train_textbook, tolerance=1e-3, note="plain with torch's default AdamW, which is not fused"),
]
