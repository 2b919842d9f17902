"""The weights of evaluation and of the saved model, where they are not the trained ones: averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpointing.optimizer_state import parameter_names
from trainwright.core.errors import SettingError
from trainwright.core.trees import parameters_in
from trainwright.modules.modes import unnoticed
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.optim.averaging import AveragedWeights


class EvaluationWeights:
    """The averaged weights of one `fit`, or those of an optimizer that keeps two sets itself (schedule-free ones).

    Inside `evaluated()` the model holds the evaluation weights. `install` leaves them in the model when the run ends,
    and `restore` copies the trained weights back for a next `fit`.
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
        """Buffers, each with its value beside the trained weights; set by `install`."""
        self._inside = False
        if average is not None and self._switching:
            name = type(self._switching[0]).__name__
            raise SettingError(f"average={average.name}, and {name} averages by itself", fix="average=None")

    @property
    def differs(self) -> bool:
        """Whether there can be two sets of weights."""
        return self.average is not None or bool(self._switching)

    @property
    def name(self) -> str:
        """The name of the evaluation weights: "averaged", or empty where they are the trained ones."""
        return "averaged" if self._switching or (self.average is not None and self.average.taken) else ""

    def start(self) -> None:
        """Switch the optimizers to the trained weights."""
        for optimizer in self._switching:
            optimizer.train()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Hold the evaluation weights inside; afterwards the trained ones again, bit for bit."""
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

    def install(self) -> None:
        """Leave the evaluation weights in the model; called again after other weights were loaded into it."""
        if self.average is not None:
            if not self._inside:
                self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
            self.average.apply(self._forward)
        self._show()
        self._inside = True

    def restore(self) -> bool:
        """Copy the trained weights back; False where the weights were changed since `install`."""
        if self.average is None or not self.average.taken:
            return True
        if not self.average.revert():
            return False
        with torch.no_grad():
            for buffer, trained in self._buffers:  # those of a restored best are of another update
                buffer.copy_(trained)
        return True

    def state_dict(self) -> Tree:
        """Return the trained weights; called inside `evaluated`, when part "model" holds the evaluation weights."""
        if self.average is not None:
            return self.average.state_dict()
        return {"raw": None if self._raw is None else self._by_name(self._raw)}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load a state, after the model and the optimizers; return a line to report, or None."""
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
        """Return tensors in the order of the parameters by name, or by number where a parameter has no name."""
        names, nameless = parameter_names(self._modules), count()
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
