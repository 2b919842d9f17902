"""Which weights the model shows while it is evaluated, kept and saved, where they are not those that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpointing.optimizer_state import first_names, named_parameters
from trainwright.core.errors import SettingError, message
from trainwright.core.trees import parameters_in
from trainwright.modules.modes import unnoticed
from trainwright.optim.averaged_weights import AveragedWeights
from trainwright.protocols import Tree


class Shown:
    """Averaged weights, and those of optimizers that keep two sets themselves (schedule-free ones).

    One `fit` has one of these. Inside `evaluated()` the model holds the weights that count; `leave` keeps it so when
    the run is over, and `put_back` takes the trained ones up again for a next `fit`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        average: AveragedWeights | None,
        optimizers: Mapping[str, Optimizer],
        loss: Any = None,
        forward: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.average, self._forward = model, average, forward
        self._modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
        self._switching: list[Any] = [one for one in optimizers.values() if _switches(one)]
        self._raw: list[Tensor] | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """The buffers of the trained weights, once `leave` was called."""
        self._inside = False
        if average is not None and self._switching:
            name = type(self._switching[0]).__name__
            raise SettingError(message(f"average={average.name}, and {name} averages by itself", fix="average=None"))

    @property
    def differs(self) -> bool:
        """Whether there may be two sets of weights at all."""
        return self.average is not None or bool(self._switching)

    @property
    def name(self) -> str:
        """What the shown weights are called: "averaged", or nothing where they are those that are trained."""
        return "averaged" if self._switching or (self.average is not None and self.average.taken) else ""

    def start(self) -> None:
        """Have the optimizers show the weights that are trained."""
        for optimizer in self._switching:
            optimizer.train()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """The weights that count inside; afterwards the trained ones again, bit for bit."""
        if self._inside or not self.differs:
            yield
            return
        self._inside = True
        held = (*self.model.parameters(), *self.model.buffers(), *self._parameters)
        try:
            with unnoticed(held), self._swapped():
                yield
        finally:
            self._inside = False

    def leave(self) -> None:
        """Leave the model with the weights that count, for good; called again after others were loaded on top."""
        if self.average is not None:
            if not self._inside:
                self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
            self.average.apply(self._forward)
        self._show()
        self._inside = True

    def put_back(self) -> bool:
        """Take the trained weights up again; False where somebody has changed the weights since `leave`."""
        if self.average is None or not self.average.taken:
            return True
        if not self.average.revert():
            return False
        with torch.no_grad():
            for buffer, trained in self._buffers:  # those of a restored best are of another update
                buffer.copy_(trained)
        return True

    def state_dict(self) -> Tree:
        """The trained weights; to be asked for inside `evaluated`, when part "model" holds those that count."""
        if self.average is not None:
            return self.average.state_dict()
        return {"raw": None if self._raw is None else self._by_name(self._raw)}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Take over a state, after the model and the optimizers have been loaded; return what is to be reported."""
        if self.average is not None:
            return self.average.load_state_dict(tree)
        self.start()
        with torch.no_grad():
            for name, parameter in self._by_name(self._parameters).items():
                parameter.copy_(tree["raw"][name])
        return None

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        if self.average is not None:
            with self.average.swapped(self._forward):
                yield
            return
        self._raw = [p.detach().clone() for p in self._parameters]
        self._show()
        try:
            yield
        finally:
            self._hide()

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str | int, Tensor]:
        """Tensors in the order of the parameters, by name; those of parameters without a name are counted."""
        names, nameless = first_names(dict(named_parameters(self._modules))), count()
        keys = [names.get(id(parameter)) for parameter in self._parameters]
        return {next(nameless) if key is None else key: one for key, one in zip(keys, tensors, strict=True)}

    @property
    def _parameters(self) -> list[Tensor]:
        return parameters_in(*self._switching)

    def _show(self) -> None:
        for optimizer in self._switching:
            optimizer.eval()

    def _hide(self) -> None:
        self.start()
        assert self._raw is not None
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._raw)
        self._raw = None


def _switches(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
