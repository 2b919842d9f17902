"""Average complete gradients over the ranks, in few collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainwright.core.torch_private import version_of
from trainwright.distributed.world import World, split_by_bytes

BYTES = 25 * 2**20
"""The size of a bucket by default, as in torch's DDP."""
_WIDE = (torch.float32, torch.float64)


class GradientBuckets:
    """Parameters in buckets: of one device and dtype, up to a number of bytes each; one collective for each."""

    def __init__(self, parameters: Iterable[Tensor], world: World, *, bucket_mb: float | None = None) -> None:
        self._world = world
        self._buckets: list[list[Tensor]] = []
        most = BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for alike in kinds.values():
            self._buckets += split_by_bytes(alike, most)
        self._buckets.sort(key=lambda bucket: bucket[0].dtype not in _WIDE)  # the first carries the additional numbers
        self._found: list[Tensor] = []
        """By bucket: for each parameter the fraction of ranks that had a gradient of it."""
        self._read: list[float] | None = None

    @property
    def unused(self) -> bool:
        """Whether some parameter had no gradient on some rank in the last `average`; reads the device."""
        return any(share < 1 - 0.5 / self._world.size for share in self._shares())

    def average(self, carried: Tensor) -> Tensor:
        """Replace every gradient by its mean over the ranks; return the mean of `carried`, two numbers.

        A gradient that only some ranks have is 0 on the others; one that none has stays None. A rank that has all of
        them reads nothing back from the device, another one once.
        """
        self._found, self._read = [], None
        missing: list[tuple[int, Tensor, Tensor]] = []
        waits, position = True, itertools.count()
        for bucket in self._buckets:
            rides = waits and bucket[0].dtype in _WIDE
            *means, found, summed = self._mean(bucket, carried if rides else carried[:0])
            self._found.append(found.clone())  # a view would hold the memory of the complete bucket
            for parameter, mean, index in zip(bucket, means, position, strict=False):
                if parameter.grad is None:
                    missing.append((index, parameter, mean))
                else:
                    _take(parameter, mean)
            if rides:
                carried, waits = summed, False
        for index, parameter, mean in missing:
            if self._shares()[index]:
                _take(parameter, mean)
        if waits:
            carried = carried / self._world.size
            self._world.all_reduce(carried)
        return carried

    def _mean(self, bucket: list[Tensor], carried: Tensor) -> tuple[Tensor, ...]:
        """Return the means of the gradients of a bucket, the fractions of ranks that had them, and of `carried`."""
        dense = [_dense(parameter) for parameter in bucket]
        like = dense[0]
        if all(parameter.grad is not None for parameter in bucket):
            has = like.new_ones(len(bucket))
        else:
            has = like.new_tensor([float(parameter.grad is not None) for parameter in bucket])
        flat = torch.cat([*[part.reshape(-1) for part in dense], has, carried.to(like.device, like.dtype)])
        flat.div_(self._world.size)  # before the sum, as torch's DDP does
        self._world.all_reduce(flat)
        pieces: tuple[Tensor, ...] = flat.split([*[part.numel() for part in dense], len(bucket), len(carried)])
        return pieces

    def _shares(self) -> list[float]:
        """Return for each parameter the fraction of ranks that had a gradient; one read after each `average`."""
        if self._read is None:
            device = self._found[0].device if self._found else None
            found = [one.to(device, torch.float32) for one in self._found]
            shares: list[float] = torch.cat(found).tolist() if found else []
            self._read = shares
        return self._read


def _dense(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter as a dense, contiguous, real tensor; zeros where it has none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
    elif gradient.is_sparse:
        gradient = gradient.to_dense()
    real: Tensor = torch.view_as_real(gradient.contiguous()) if gradient.is_complex() else gradient
    return real


def _take(parameter: Tensor, mean: Tensor) -> None:
    """Set the gradient of a parameter to the mean, in place where it has one."""
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
    """Return the identity and version of each gradient: it differs after a gradient was made or changed."""
    return {id(p): (0, 0) if p.grad is None else (id(p.grad), version_of(p.grad)) for p in parameters}
