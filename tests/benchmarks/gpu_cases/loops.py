"""The loops by hand: the textbook's, the tuned one, the same compiled, and one whose whole update is a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gpu_cases.entry import Batch, Clock, Contestant, Task

WARM = 3
"""Eager updates before a capture; they are updates as all others."""


def train_plain(task: Task, clock: Clock) -> nn.Module:
    """As guides write it: torch's default optimizer, and the loss read after every update."""
    model = task.model()
    optimizer = task.optimizer(model.parameters(), fused=False)
    for _ in range(1 + task.epochs):
        total = 0.0
        for batch in task.data:
            optimizer.zero_grad()
            with task.autocast():
                loss = task.loss(model, batch)
            loss.backward()
            if task.clip is not None:
                clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            total += loss.item()
        clock.epoch_ended()
    return model


def train_tuned(task: Task, clock: Clock) -> nn.Module:
    """Fused optimizer, and nothing read before an epoch's end."""
    return tuned(task, clock, task.model())


def train_compiled(task: Task, clock: Clock) -> nn.Module:
    """The tuned loop, its model compiled whole."""
    model = task.model()
    model.compile(dynamic=False, backend=task.bench.backend)
    return tuned(task, clock, model)


def tuned(task: Task, clock: Clock, model: nn.Module) -> nn.Module:
    optimizer = task.optimizer(model.parameters(), fused=True)
    parameters = list(model.parameters())
    scaler = GradScaler(task.device.type) if task.precision == "fp16" else None
    for _ in range(1 + task.epochs):
        losses = []
        for batch in task.data:
            optimizer.zero_grad(set_to_none=True)
            with task.autocast():
                loss = task.loss(model, batch)
            if scaler is None:
                loss.backward()
                if task.clip is not None:
                    clip_grad_norm_(parameters, task.clip)
                optimizer.step()
            else:
                scaled_update(scaler, optimizer, loss, parameters=parameters, clip=task.clip)
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
        clock.epoch_ended()
    return model


def scaled_update(
    scaler: GradScaler, optimizer: Optimizer, loss: Tensor, *, parameters: list[nn.Parameter], clip: float | None
) -> None:
    """As torch's guide to gradient scaling has it: unscale, clip, step, update the scale."""
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()


def train_graphed(task: Task, clock: Clock) -> nn.Module:
    """One CUDA graph of a whole update: forward, backward, clip and step, from inputs that stay where they are."""
    graphed = _Graphed(task)
    for _ in range(1 + task.epochs):
        for batch in task.data:
            graphed.update(batch)
        graphed.total.item()
        graphed.total.zero_()
        clock.epoch_ended()
    clock.note = f"a graph of the whole update, {graphed.replays} replays"
    return graphed.model


class _Graphed:
    """Updates of a task: the first are eager, on a stream of their own; then one is captured, and replayed for all."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, task.model()
        self.total = torch.zeros((), device=task.device)
        self._parameters = list(self.model.parameters())
        self._optimizer = task.optimizer(self._parameters, fused=True, capturable=True)
        self._inputs = tuple(torch.empty_like(one) for one in task.data[0])
        self._side = torch.cuda.Stream(task.device)
        self._eager = self.replays = 0
        self._graph: Any = None

    def update(self, batch: Batch) -> None:
        for place, one in zip(self._inputs, batch, strict=True):
            place.copy_(one, non_blocking=True)
        if self._graph is None and self._eager == WARM:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
            self.replays += 1
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._optimizer.zero_grad(set_to_none=True)
            self._compute()
        torch.cuda.current_stream().wait_stream(self._side)
        self._eager += 1

    def _capture(self) -> None:
        """Capture an update, which is not carried out; its gradients are made in the graph's memory."""
        self._optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._compute()

    def _compute(self) -> None:
        with self.task.autocast(cache_enabled=False):  # a cast that is cached would outlive the capture
            loss = self.task.loss(self.model, self._inputs)
        loss.backward()
        if self.task.clip is not None:
            clip_grad_norm_(self._parameters, self.task.clip)
        self._optimizer.step()
        self.total.add_(loss.detach())


PLAIN = Contestant("plain", train_plain, note="as guides write it: default optimizer, loss read per update")
TUNED = Contestant("tuned", train_tuned, note="fused optimizer, nothing read before an epoch's end", equals=None)
GRAPH = Contestant("graph", train_graphed, note="the whole update as one CUDA graph", needs_cuda=True)
COMPILED = Contestant("compile", train_compiled, note="tuned, the model compiled whole", equals=None)
