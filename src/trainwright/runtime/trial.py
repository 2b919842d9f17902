"""Tries a computation two ways from the same state, says how far the results are apart, and puts the state back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trainwright.runtime.memory import left_on

FAR = 0.05
"""How far apart two ways may end, as a share of how far they go: kernels may add up in another order."""


class Trial:
    """Tensors, and all random states, around a computation that changes them in place."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, *, measured: int) -> None:
        """`measured`: how many of the first tensors are compared; the others are kept and put back alone."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._device, self._measured = device, measured
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        self.fits = device.type != "cuda" or left_on(device) > 4 * size
        """Whether there is memory for two copies of the tensors."""
        self._before = [tensor.clone() for tensor in self._tensors] if self.fits else []
        self._draws = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._draws_of_host = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._ends: list[list[Tensor]] = []

    @contextmanager
    def one_way(self) -> Iterator[None]:
        """Compute inside; what came out is kept, and all is put back."""
        yield
        self._ends.append([tensor.clone() for tensor in self._tensors[: self._measured]])
        self.put_back()

    def put_back(self) -> None:
        """Make the tensors, and the random state, what they were."""
        with torch.no_grad():
            for tensor, before in zip(self._tensors, self._before, strict=bool(self._before)):
                tensor.copy_(before)
        if self._draws is not None:
            torch.cuda.set_rng_state(self._draws, self._device)
        python, numpy, of_torch = self._draws_of_host
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)

    @property
    def difference(self) -> float | None:
        """How far the two ends are apart, as a share of the second's way from where both began; waits for it.

        None where neither has gone anywhere: that tells nothing.
        """
        one, other = self._ends
        apart, way = torch.stack([_distance(one, other), _distance(other, self._before[: self._measured])]).tolist()
        if not way:
            return 1.0 if apart else None
        return float(apart / way)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The root of the sum of squared differences, over all floating tensors."""
    squares = [(a - b).abs().double().square().sum() for a, b in zip(one, other, strict=True)]
    return torch.stack(squares).sum().sqrt()
