"""Keeps what one update may move before its first step, and puts it back where memory ran out in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.core.rng import have_moved, random_state, set_random_state
from trainwright.core.trees import inside, parameters_of, snapshot
from trainwright.update.owner import networks_of
from trainwright.update.status import Outcome
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.owner import Owner


class Before:
    """Everything as it was before the window in hand: random states, buffers, state, numbers.

    A buffer is copied anew only where it has moved since the last copy.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._owner = run, run.owner
        self._buffers: list[_Buffer] = []
        self._weights: list[Tensor] = []
        self._state: dict[str, Any] = {}
        hooks = run.owner.hooks
        self._measures = hooks.updates_itself or hooks.computes_itself
        """Whether code of the user's own may write to weights without a trace, by `.data`."""

    def meet(self) -> None:
        """Take the buffers and weights that there are now."""
        roots = networks_of(self._owner)
        modules = list(dict.fromkeys(module for root in roots for module in inside(root)))
        named = [(module, name) for module in modules for name in module._buffers]
        self._buffers = [_Buffer(module, name) for module, name in named]
        weights = [p for root in roots for p in parameters_of(root)] + self._run.gradients.parameters
        self._weights = list({id(p): p for p in weights}.values())

    def keep(self) -> None:
        """Keep all as it is now."""
        self._random = random_state()
        self._state = snapshot(self._owner.state)
        self._numbers = self._run.ledger.keep()
        for buffer in self._buffers:
            buffer.keep()
        self._lay = [(p._version, p.data_ptr()) for p in self._weights]
        self._norms = self._measured() if self._measures else []

    def put_back(self, window: Window) -> None:
        """Go back to where the window began; what it had computed is dropped."""
        run, owner = self._run, self._owner
        run.gradients.zero()
        run.outcome, run.factor = Outcome(), 1.0
        for stepper in run.steppers.all.steppers:
            stepper.norm, stepper.factor, stepper.scale = None, 1.0, None
        if not run.strategy.updates_ahead:  # else the flag may be that of an earlier update, whose numbers are not read
            run.steppers.lower_flags()
        run.ledger.go_back(self._numbers, window)
        owner.state.clear()
        owner.state.update(snapshot(self._state))
        for buffer in self._buffers:
            buffer.put_back()
        set_random_state(self._random)

    @property
    def weights_have_moved(self) -> bool:
        """Whether any weight is another one than before."""
        if [(p._version, p.data_ptr()) for p in self._weights] != self._lay:
            return True
        measured = self._measured() if self._measures else []
        return any(not torch.equal(a, b) for a, b in zip(self._norms, measured, strict=True))

    @property
    def has_drawn(self) -> bool:
        """Whether a random number was drawn since."""
        return have_moved(self._random)

    def _measured(self) -> list[Tensor]:
        """A number of each weight that any change would change."""
        with torch.no_grad():
            return [p.detach().norm() if p.is_floating_point() else p.sum() for p in self._weights]


@contextmanager
def buffers_stay(owner: Owner) -> Iterator[None]:
    """Put back at the end whatever a forward inside has done to buffers; those of compiled scripts apart."""
    modules = [module for root in networks_of(owner) for module in inside(root) if isinstance(module._buffers, dict)]
    buffers = [_Buffer(module, name) for module in dict.fromkeys(modules) for name in module._buffers]
    for buffer in buffers:
        buffer.keep()
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.put_back()


class _Buffer:
    """One buffer of a module: which tensor it is, and what was in it."""

    __slots__ = ("_kept", "_module", "_name", "_tensor", "_version")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._tensor: Tensor | None = None
        self._kept: Tensor | None = None
        self._version = -1

    def keep(self) -> None:
        tensor = self._module._buffers.get(self._name)
        if tensor is None:
            self._tensor = None
        elif tensor is not self._tensor or self._moved(tensor):
            self._tensor, self._kept = tensor, tensor.detach().clone()
            self._version = _version(tensor)

    def put_back(self) -> None:
        tensor = self._tensor
        if self._name in self._module._buffers:
            self._module._buffers[self._name] = tensor
        if tensor is not None and self._kept is not None and self._moved(tensor):
            with torch.no_grad():
                tensor.copy_(self._kept)
            self._version = _version(tensor)

    def _moved(self, tensor: Tensor) -> bool:
        return tensor.is_inference() or tensor._version != self._version


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
