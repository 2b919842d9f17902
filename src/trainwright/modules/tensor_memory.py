"""Follows the memory of tensors that a computation makes: how much of it is alive, and at most was, to the byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainwright.core.torch_private import TorchDispatchMode, sparse_parts, storage_id
from trainwright.core.trees import tensors_in

T = TypeVar("T")


class Living(TorchDispatchMode):
    """Inside it, memory of tensors counts from its making until nothing holds it any more, views being of one piece.

    It works on the meta device too, where memory has a size and no numbers. `known`: tensors that were there before.
    `maker` is asked to whom what is made now belongs.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.maker: Callable[[], Any] = lambda: None
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """The most that were alive at once."""
        self.by: dict[Any, int] = {}
        """Bytes alive, by maker."""
        self._alive: dict[int, tuple[int, Any]] = {}
        # To hold what was there before: an address of its that came free could be that of another piece.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._addresses = {storage_id(storage) for storage in self._known}

    def __torch_dispatch__(
        self, func: Callable[..., T], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Run an operation, and take note of what it has made."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            for piece in _pieces(tensor):
                self._note(piece)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._addresses or key in self._alive:
            return
        size, maker = storage.nbytes(), self.maker()
        self._alive[key] = size, maker
        self.now += size
        self.by[maker] = self.by.get(maker, 0) + size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        size, maker = self._alive.pop(key)
        self.now -= size
        self.by[maker] -= size


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor is made of: itself, or where its numbers are and what they are."""
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    return (tensor,)
