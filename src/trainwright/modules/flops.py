"""Counts the floating-point operations of a model without running it, and knows what devices can do at most."""

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
"""Operations per second in bfloat16, without sparsity and summed in float32, as the makers tell, by words of the name;
the first that fits counts. Those of a part of a device or of one for laptops are others, and not known here."""


def peak_of(name: str) -> float | None:
    """Return the peak of a device by its name, in operations per second; None where it is not known."""
    words = re.split(r"[\s\-_]+", name.upper())
    if "MIG" in words or "LAPTOP" in words:
        return None
    return next((peak for known, peak in PEAKS.items() if set(known.split()) <= set(words)), None)


def count_flops(model: nn.Module, *inputs: Any, backward: bool = True, **keywords: Any) -> int:
    """Return the floating-point operations of `model(*inputs, **keywords)`, with those of its backward.

    Those of matrix products, convolutions and attention, a multiplication with its addition being two: M x K times
    K x N are 2 * M * N * K. It runs a copy of the model on torch's meta device, which holds shapes and no numbers:
    model, modes, buffers and random state stay as they are. Hooks of the model are left out, and what
    `checkpoint_activations` computes again is counted once. An error of the model's where it needs numbers (`.item()`),
    or names a device of its own.
    """
    from torch.utils.flop_counter import FlopCounterMode

    meta = torch.device("meta")
    with rng_preserved(), torch.enable_grad(), meta:  # what a forward makes without a device is made there
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
    """A copy of a model without hooks, on a device; on meta without a copy of its numbers. None: where it lies."""
    model = uncompiled(model)
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                known[id(value)] = OrderedDict()
            elif isinstance(value, Tensor):  # a weight that a hook computes, say
                known[id(value)] = _copied(value, device)
    for tensor in (*model.parameters(), *model.buffers()):
        known[id(tensor)] = _copied(tensor, device)
    return copy.deepcopy(model, known)


def _release(twin: nn.Module) -> None:
    """Have nothing computed twice: those are no operations of the model's."""
    activations = sys.modules.get("trainwright.modules.activations")
    if activations is not None:
        activations.release_all(twin)


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    with torch.no_grad():
        copied = tensor.clone() if device is None else torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
