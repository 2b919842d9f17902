"""Averages gradients that are whole already over the processes, in few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainwright.parallel.world import World, neighbours

BYTES = 25 * 2**20
"""The size of what is communicated at once, as in torch's DDP."""
_WIDE = (torch.float32, torch.float64)


class Buckets:
    """Parameters, grouped for collectives: those of one device and type lie together, up to `BYTES` of them."""

    def __init__(self, parameters: Iterable[Tensor], world: World) -> None:
        self._world = world
        self._buckets: list[list[Tensor]] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for alike in kinds.values():
            self._buckets += neighbours(alike, BYTES)
        self._buckets.sort(key=lambda bucket: bucket[0].dtype not in _WIDE)  # the first carries what is told
        self.unused = False
        """Whether some parameter had no gradient on some process when they were averaged last."""

    def average(self, told: Tensor) -> Tensor:
        """Replace every gradient by its mean over the processes; returns the mean of `told`, two numbers.

        A gradient that only some processes have counts 0 on the others; one that none has stays None.
        """
        self.unused = False
        waits = True
        for bucket in self._buckets:
            rides = waits and bucket[0].dtype in _WIDE
            mean = self._average(bucket, told if rides else told[:0])
            if rides:
                told, waits = mean, False
        if waits:
            told = told / self._world.size
            self._world.sum(told)
        return told

    def _average(self, bucket: list[Tensor], told: Tensor) -> Tensor:
        one = bucket[0]
        dense = [_dense(parameter) for parameter in bucket]
        kind = dense[0].dtype
        has = torch.tensor([float(parameter.grad is not None) for parameter in bucket], dtype=kind, device=one.device)
        flat = torch.cat([*[part.reshape(-1) for part in dense], has, told.to(one.device, kind)])
        flat.div_(self._world.size)  # before the sum, as torch's DDP does
        self._world.sum(flat)
        pieces: tuple[Tensor, ...] = flat.split([*[part.numel() for part in dense], len(bucket), len(told)])
        *parts, found, told_of_all = pieces
        for parameter, part, anywhere in zip(bucket, parts, found.tolist(), strict=True):
            if anywhere:
                _take(parameter, part)
            self.unused = self.unused or anywhere < 1 - 0.5 / self._world.size
        return told_of_all


def _dense(parameter: Tensor) -> Tensor:
    """A parameter's gradient as real numbers without gaps; zeros where it has none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
    elif gradient.is_sparse:
        gradient = gradient.to_dense()
    real: Tensor = torch.view_as_real(gradient.contiguous()) if gradient.is_complex() else gradient
    return real


def _take(parameter: Tensor, mean: Tensor) -> None:
    """Have a parameter's gradient be the mean, in its own memory where it has some."""
    shaped = mean.view(*parameter.shape, 2) if parameter.is_complex() else mean.view(parameter.shape)
    shaped = torch.view_as_complex(shaped) if parameter.is_complex() else shaped
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = shaped.clone()
    elif gradient.is_sparse:
        parameter.grad = shaped.to_sparse(gradient.sparse_dim())
    else:
        with torch.no_grad():
            gradient.copy_(shaped)


def fingerprint(parameters: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    """What tells whether gradients were made or changed since: which tensors they are, and how often written to."""
    return {id(p): (0, 0) if p.grad is None else (id(p.grad), p.grad._version) for p in parameters}
