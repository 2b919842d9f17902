"""Finds what a mean of torch's own was divided by where no gradient is recorded: in an evaluation by a user's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.base.records import Count
from trainwright.slots.losses import known_loss

_MEANS: frozenset[Any] = frozenset({F.cross_entropy, F.nll_loss})


class Counting(TorchFunctionMode):
    """Looks on, inside `with`, while torch computes means over class numbers, and tells what each was a mean over.

    With a gradient the loss itself holds the number (`counted_by_torch`); this gives the same one without.
    """

    found = False
    """Whether a loss was recognised so far."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Tensor, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch compute, and keep what may be asked about."""
        made = func(*args, **(kwargs or {}))
        if func in _MEANS:
            self._made.append((made, func, args, kwargs or {}))
        return made

    def begin(self) -> None:
        """Forget the batch before."""
        self._made.clear()

    @property
    def seen(self) -> int:
        """How many means of this batch have passed by."""
        return len(self._made)

    def count_of(self, loss: Tensor) -> Count | None:
        """Return what `loss` is a mean over, where it is one that torch has just made; else None."""
        for made, function, args, kwargs in self._made:
            if made is loss:
                count = _count(function, args, kwargs)
                self.found = self.found or count is not None
                return count
        return None


def _count(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Count | None:
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    target = options["target"]
    old = options["size_average"] is not None or options["reduce"] is not None
    if old or options["reduction"] != "mean" or options.get("label_smoothing") or target.is_floating_point():
        return None
    weight = {} if options["weight"] is None else {"weight": options["weight"]}
    known = known_loss(partial(function, ignore_index=options["ignore_index"], **weight))
    return None if known is None else known.count(target)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
