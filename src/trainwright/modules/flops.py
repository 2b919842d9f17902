"""Floating-point operations of a model, counted on the meta device, and the peak rates of devices."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.device import move
from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import uncompiled
from trainwright.core.trees import tensors_in

PEAKS: dict[str, float] = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "MI300X": 1307e12,
}
"""Peak rates by words of the device name: dense bfloat16 operations per second with float32 accumulation, from the
vendors' data sheets. The first match counts. MIG partitions and laptop devices have other rates and are not listed."""


def peak_of(name: str) -> float | None:
    """Return the peak rate of a device in operations per second, by its name; None if it is not listed."""
    words = re.split(r"[\s\-_]+", name.upper())
    if "MIG" in words or "LAPTOP" in words:
        return None
    return next((peak for known, peak in PEAKS.items() if set(known.split()) <= set(words)), None)


def count_flops(model: nn.Module, *inputs: Any, backward: bool = True, **keywords: Any) -> int:
    """Return the number of floating-point operations of `model(*inputs, **keywords)` and its backward.

    Counts matrix products, convolutions and attention; a multiply-add is two operations, so an (M, K) x (K, N) product
    counts 2 * M * N * K. A copy of the model runs on torch's meta device, with shapes but without values: weights,
    modes, buffers and random state do not change. Hooks do not run, and blocks of `checkpoint_activations` are counted
    once. A model that reads values (`.item()`) or uses a fixed device raises its own error.

    Args:
        model: The model.
        *inputs: Its positional inputs.
        backward: Whether to add the operations of the backward.
        **keywords: Its keyword inputs.
    """
    from torch.utils.flop_counter import FlopCounterMode

    meta = torch.device("meta")
    with rng_preserved(), torch.enable_grad(), meta:  # a forward makes new tensors on meta by default
        twin = twin_on(model, meta)
        _release(twin)
        given, named = move(inputs, meta), move(keywords, meta)
        with FlopCounterMode(display=False) as counter:
            output = twin(*given, **named)
            roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if backward else []
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return int(counter.get_total_flops())


def twin_on(model: nn.Module, device: torch.device | None) -> nn.Module:
    """Return a copy of a model without hooks: an exact one for None, else on a device with uninitialized values."""
    model = uncompiled(model)
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                known[id(value)] = OrderedDict()
            elif isinstance(value, Tensor):  # for example a weight that a pre-forward hook computes
                known[id(value)] = _copied(value, device)
    for tensor in (*model.parameters(), *model.buffers()):
        known[id(tensor)] = _copied(tensor, device)
    return copy.deepcopy(model, known)


def _release(twin: nn.Module) -> None:
    """Undo activation checkpointing, so that repeated operations are not counted."""
    activations = sys.modules.get("trainwright.modules.activations")
    if activations is not None:
        activations.release_all(twin)


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    with torch.no_grad():
        copied = tensor.clone() if device is None else torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
