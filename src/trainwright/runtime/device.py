"""Choose a device, place the model there, and move nested batches without changing their types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.base.errors import SettingError, message


def choose_device(wanted: str | torch.device, model: nn.Module) -> torch.device:
    """Return the device of a run: as given; "auto" is where the model lies, else cuda, mps, cpu in this order."""
    if wanted != "auto":
        try:
            device = torch.device(wanted)
        except RuntimeError as error:
            raise SettingError(
                message(f"device={wanted!r} is no device", want='"auto", "cpu", "cuda", "cuda:1", "mps"')
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SettingError(message(f"device={wanted!r}, and this torch sees no CUDA device", fix='device="auto"'))
        return device
    placed = {p.device for p in model.parameters()}
    for device in placed:
        if device.type != "cpu":
            return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module to `device` in place; one that already lies on several devices stays as it is."""
    placed = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if placed and placed != {device} and len(placed) == 1:
        module.to(device)


def place_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to where its parameters lie now (`load_state_dict` casts it there)."""
    state = [(p, value) for p, values in optimizer.state.items() for value in values.values()]
    if any(isinstance(v, Tensor) and v.dim() and v.device != p.device for p, v in state):
        optimizer.load_state_dict(optimizer.state_dict())


def move(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on `device`; tuples, named tuples, dicts, dataclasses keep their types."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda" and batch.is_cpu and batch.is_pinned())
    if hasattr(batch, "to") and callable(batch.to):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _rebuild(batch, {key: move(value, device) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        items = (move(value, device) for value in batch)
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(moved, field.name, move(getattr(batch, field.name), device))
        return moved
    return batch


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating type of a device: float64, and float32 on mps, which has no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def _rebuild(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return moved
    try:
        rebuilt = copy.copy(batch)
        for key, value in moved.items():
            rebuilt[key] = value  # type: ignore[index]
    except TypeError:  # a read-only mapping
        return moved
    return rebuilt
