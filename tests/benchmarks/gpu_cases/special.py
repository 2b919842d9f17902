"""Loops by hand of B7 and B8: images on the device or by a pinned ring, and an update folded into one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from gpu_cases.entry import Clock, Contestant, Task
from gpu_cases.ours import MEAN, STD, order
from gpu_cases.ours import train as train_ours

SLOTS = 3
"""Batches under way from the host."""


def train_resident(task: Task, clock: Clock) -> nn.Module:
    """All rows on the device, whence each batch is gathered."""
    assert task.rows is not None
    images, labels = (one.to(task.device) for one in task.rows)
    epochs = [[picked.to(task.device) for picked in epoch] for epoch in order(task)]
    model, step = _prepared(task)
    for epoch in epochs:
        losses = [step(images.index_select(0, picked), labels.index_select(0, picked)) for picked in epoch]
        torch.stack(losses).mean().item()
        clock.epoch_ended()
    return model


def train_ring(task: Task, clock: Clock) -> nn.Module:
    """Rows on the host: gathered into pinned memory, and sent by a stream of its own while the last are computed."""
    assert task.rows is not None
    ring, epochs = _Ring(task), order(task)
    model, step = _prepared(task)
    for epoch in epochs:
        losses = []
        for number in range(min(SLOTS - 1, len(epoch))):
            ring.send(number, epoch[number])
        for number in range(len(epoch)):
            losses.append(step(*ring.take(number)))
            ring.free(number)
            if number + SLOTS - 1 < len(epoch):
                ring.send(number + SLOTS - 1, epoch[number + SLOTS - 1])
        torch.stack(losses).mean().item()
        clock.epoch_ended()
    return model


class _Ring:
    """Pinned slots and slots on the device, each with events that say when it has arrived and when it is free."""

    def __init__(self, task: Task) -> None:
        assert task.rows is not None
        self._rows, self._stream = task.rows, torch.cuda.Stream(task.device)
        shapes = [(torch.Size((task.batch_size, *one.shape[1:])), one.dtype) for one in task.rows]
        self._host = [[torch.empty(shape, dtype=dtype).pin_memory() for shape, dtype in shapes] for _ in range(SLOTS)]
        self._device = [
            [torch.empty(shape, dtype=dtype, device=task.device) for shape, dtype in shapes] for _ in range(SLOTS)
        ]
        self._arrived = [torch.cuda.Event() for _ in range(SLOTS)]
        self._free = [torch.cuda.Event() for _ in range(SLOTS)]

    def send(self, number: int, picked: Tensor) -> None:
        slot = number % SLOTS
        self._arrived[slot].synchronize()  # of the batch before in this slot: pinned memory may be written again
        self._stream.wait_event(self._free[slot])
        with torch.cuda.stream(self._stream):
            for rows, host, device in zip(self._rows, self._host[slot], self._device[slot], strict=True):
                torch.index_select(rows, 0, picked, out=host)
                device.copy_(host, non_blocking=True)
            self._arrived[slot].record(self._stream)

    def take(self, number: int) -> list[Tensor]:
        torch.cuda.current_stream().wait_event(self._arrived[number % SLOTS])
        return self._device[number % SLOTS]

    def free(self, number: int) -> None:
        self._free[number % SLOTS].record()


def _prepared(task: Task) -> tuple[nn.Module, Any]:
    """The model, and a function that makes an update of images as they were stored and returns the loss."""
    model = task.model()
    optimizer = task.optimizer(model.parameters(), fused=True)
    layout = torch.channels_last if task.lies_channels_last else torch.contiguous_format
    mean, std = (torch.tensor(one, device=task.device).reshape(-1, 1, 1) for one in (MEAN, STD))

    def step(images: Tensor, labels: Tensor) -> Tensor:
        scaled = images.to(torch.float32, memory_format=layout).div_(255).sub_(mean).div_(std)
        optimizer.zero_grad(set_to_none=True)
        with task.autocast():
            loss = task.loss(model, (scaled, labels))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def train_gradients(task: Task, clock: Clock) -> nn.Module:
    """Forward and backward alone."""
    model = task.model()
    optimizer = task.optimizer(model.parameters(), fused=True)
    scaler = GradScaler(task.device.type)
    for _ in range(1 + task.epochs):
        for batch in task.data:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(task.loss(model, batch)).backward()
        clock.epoch_ended()
    return model


def train_folded(task: Task, clock: Clock) -> nn.Module:
    """Loss scale and clip as one factor that the optimizer's fused kernel takes, and its flag for what overflowed."""
    model = task.model()
    optimizer: Any = task.optimizer(model.parameters(), fused=True)
    parameters = list(model.parameters())
    scale = torch.full((), 2.0**16, device=task.device)
    healthy = torch.zeros((), dtype=torch.int32, device=task.device)
    assert task.clip is not None
    for _ in range(1 + task.epochs):
        for batch in task.data:
            optimizer.zero_grad(set_to_none=True)
            (task.loss(model, batch) * scale).backward()
            norms = torch._foreach_norm([parameter.grad for parameter in parameters])
            norm = torch.linalg.vector_norm(torch.stack(norms)) / scale
            optimizer.grad_scale = scale / (task.clip / (norm + 1e-6)).clamp(max=1.0)
            optimizer.found_inf = (~norm.isfinite()).to(torch.float32)
            optimizer.step()
            torch._amp_update_scale_(scale, healthy, optimizer.found_inf, 2.0, 0.5, 2000)
        clock.epoch_ended()
    return model


RESIDENT = Contestant("resident", train_resident, note="by hand: all rows on the device", equals=None)
RING = Contestant("ring", train_ring, note="by hand: pinned ring and a copy stream", needs_cuda=True, equals="resident")
FROM_HOST = Contestant(
    "trainwright",
    partial(train_ours, device_data=False),
    note="batches(...), Fast(device_data=False)",
    equals="resident",
)
ON_DEVICE = Contestant(
    "trainwright-resident", train_ours, note="batches(...), Fast(device_data=True)", equals="resident"
)
GRADIENTS = Contestant("gradients", train_gradients, note="forward and backward, no update", equals=None)
FOLDED = Contestant("folded", train_folded, note="by hand: scale and clip as one factor in the fused kernel")
