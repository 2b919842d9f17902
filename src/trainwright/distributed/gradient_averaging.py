"""Averages gradients that are whole already over the processes, in few collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainwright.core.torch_private import version_of
from trainwright.distributed.world import World, neighbours

BYTES = 25 * 2**20
"""The size of what is communicated at once where nothing is said, as in torch's DDP."""
_WIDE = (torch.float32, torch.float64)


class GradientBuckets:
    """Parameters, grouped for collectives: those of one device and type lie together, up to a number of bytes."""

    def __init__(self, parameters: Iterable[Tensor], world: World, *, bucket_mb: float | None = None) -> None:
        self._world = world
        self._buckets: list[list[Tensor]] = []
        most = BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for alike in kinds.values():
            self._buckets += neighbours(alike, most)
        self._buckets.sort(key=lambda bucket: bucket[0].dtype not in _WIDE)  # the first carries what is told
        self._found: list[Tensor] = []
        """By bucket: for each parameter the share of processes that had a gradient of it."""
        self._read: list[float] | None = None

    @property
    def unused(self) -> bool:
        """Whether some parameter had no gradient on some process when they were averaged last; reads the device."""
        return any(share < 1 - 0.5 / self._world.size for share in self._shares())

    def average(self, told: Tensor) -> Tensor:
        """Replace every gradient by its mean over the processes; returns the mean of `told`, two numbers.

        A gradient that only some processes have counts 0 on the others; one that none has stays None. A process that
        has all of them reads nothing back from the device, another one once.
        """
        self._found, self._read = [], None
        missing: list[tuple[int, Tensor, Tensor]] = []
        waits, position = True, itertools.count()
        for bucket in self._buckets:
            rides = waits and bucket[0].dtype in _WIDE
            *means, found, told_of_all = self._mean(bucket, told if rides else told[:0])
            self._found.append(found.clone())  # else it would keep the whole bucket in memory
            for parameter, mean, index in zip(bucket, means, position, strict=False):
                if parameter.grad is None:
                    missing.append((index, parameter, mean))
                else:
                    _take(parameter, mean)
            if rides:
                told, waits = told_of_all, False
        for index, parameter, mean in missing:
            if self._shares()[index]:
                _take(parameter, mean)
        if waits:
            told = told / self._world.size
            self._world.sum(told)
        return told

    def _mean(self, bucket: list[Tensor], told: Tensor) -> tuple[Tensor, ...]:
        """The means of a bucket's gradients, which of them there are, and the mean of `told`: one collective."""
        dense = [_dense(parameter) for parameter in bucket]
        like = dense[0]
        if all(parameter.grad is not None for parameter in bucket):
            has = like.new_ones(len(bucket))
        else:
            has = like.new_tensor([float(parameter.grad is not None) for parameter in bucket])
        flat = torch.cat([*[part.reshape(-1) for part in dense], has, told.to(like.device, like.dtype)])
        flat.div_(self._world.size)  # before the sum, as torch's DDP does
        self._world.sum(flat)
        pieces: tuple[Tensor, ...] = flat.split([*[part.numel() for part in dense], len(bucket), len(told)])
        return pieces

    def _shares(self) -> list[float]:
        """By parameter: the share of processes that had a gradient of it; one read after each average at most."""
        if self._read is None:
            device = self._found[0].device if self._found else None
            found = [one.to(device, torch.float32) for one in self._found]
            shares: list[float] = torch.cat(found).tolist() if found else []
            self._read = shares
        return self._read


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
    return {id(p): (0, 0) if p.grad is None else (id(p.grad), version_of(p.grad)) for p in parameters}
