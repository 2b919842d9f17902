"""The weights for evaluation and for the saved model: trained, averaged, or those of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpointing.optimizer_state import parameter_names
from trainwright.core.errors import SettingError
from trainwright.core.torch_private import versions_preserved
from trainwright.core.trees import parameters_in
from trainwright.protocols import Tree
from trainwright.update.trainer_like import TrainerLike

if TYPE_CHECKING:
    from trainwright.optim.averaging import AveragedWeights

_NO_CONTEXT = nullcontext()


class EvaluationWeights:
    """The evaluation weights of one `fit`. In this class they are the trained weights; subclasses have two sets.

    Inside `evaluated()` the model holds the evaluation weights. `install` loads them at the end of the run; `restore`
    copies the trained weights back for the next `fit`.
    """

    average: AveragedWeights | None = None
    differs = False
    """Whether evaluation weights and trained weights may differ."""

    @property
    def name(self) -> str:
        """The name of the evaluation weights, such as "averaged"; empty for the trained ones."""
        return ""

    def start(self) -> None:
        """Prepare the trained weights for training."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the evaluation weights. Restores the trained ones bit for bit."""
        return _NO_CONTEXT

    def install(self) -> None:
        """Load the evaluation weights at the end of a run. Called again after other weights were loaded."""

    def restore(self) -> bool:
        """Copy the trained weights back. Return False, without a copy, if the weights have changed since `install`."""
        return True

    def state_dict(self) -> Tree:
        """Return the trained weights. Called inside `evaluated`: part "model" holds the evaluation weights."""
        return {}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load a state, after model and optimizers; return a line to report, or None."""
        return None


def choose_weights(
    trainer: TrainerLike, average: AveragedWeights | None, forward: Callable[[], None] | None = None
) -> EvaluationWeights:
    """Return the evaluation weights of a run. `forward`: runs the training data once, for BatchNorm statistics."""
    switching: list[Any] = [optimizer for optimizer in trainer.optimizers.values() if _switches(optimizer)]
    if switching:
        return _optimizer_weights(trainer, switching, average)
    return EvaluationWeights() if average is None else AverageWeights(trainer.model, average, forward)


def _optimizer_weights(
    trainer: TrainerLike, optimizers: list[Any], average: AveragedWeights | None
) -> OptimizerWeights:
    if average is not None:
        name = type(optimizers[0]).__name__
        raise SettingError(f"average={average.name}, and {name} averages by itself", fix="average=None")
    return OptimizerWeights(trainer.model, optimizers, trainer.loss)


class AverageWeights(EvaluationWeights):
    """Averaged weights as the evaluation weights."""

    differs = True

    def __init__(self, model: nn.Module, average: AveragedWeights, forward: Callable[[], None] | None) -> None:
        self._model, self._average, self._forward = model, average, forward
        self.average = average
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """(buffer, its value with the trained weights); set by `install`."""

    @property
    def name(self) -> str:
        """The name of the evaluation weights: empty before the first average."""
        return "averaged" if self._average.taken else ""

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Context in which the model holds the average. Restores the trained weights bit for bit."""
        with (
            versions_preserved((*self._model.parameters(), *self._model.buffers())),
            self._average.swapped(self._forward),
        ):
            yield

    def install(self) -> None:
        """Load the average at the end of a run. Called again after other weights were loaded."""
        if not self._average.is_applied:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        self._average.apply(self._forward)

    def restore(self) -> bool:
        """Copy the trained weights back. Return False, without a copy, if the weights have changed since `install`."""
        if not self._average.taken:
            return True
        if not self._average.revert():
            return False
        with torch.no_grad():
            for buffer, trained in self._buffers:  # the buffers of a restored best are of another update
                buffer.copy_(trained)
        return True

    def state_dict(self) -> Tree:
        """Return the state of the average. Called inside `evaluated`."""
        return self._average.state_dict()

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the state of the average; return a line to report, or None."""
        return self._average.load_state_dict(tree)


class OptimizerWeights(EvaluationWeights):
    """The evaluation weights of schedule-free optimizers, which switch between two sets by `train` and `eval`."""

    differs = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], loss: Any) -> None:
        self._optimizers = optimizers
        self._modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
        self._model = model
        self._trained: list[Tensor] | None = None
        """The trained weights, while the parameters hold the evaluation weights."""
        self._installed = False

    @property
    def name(self) -> str:
        """The name of the evaluation weights."""
        return "averaged"

    def start(self) -> None:
        """Switch the optimizers to the trained weights."""
        for optimizer in self._optimizers:
            optimizer.train()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Context in which the model holds the evaluation weights. Restores the trained ones bit for bit."""
        if self._installed or self._trained is not None:
            yield
            return
        with versions_preserved((*self._model.parameters(), *self._model.buffers(), *self._parameters)):
            self._trained = [parameter.detach().clone() for parameter in self._parameters]
            try:
                self._switch_to_eval()
                yield
            finally:
                self._load_trained()
                self._trained = None

    def install(self) -> None:
        """Load the evaluation weights at the end of a run."""
        self._switch_to_eval()
        self._installed = True

    def state_dict(self) -> Tree:
        """Return the trained weights by name. Called inside `evaluated`."""
        return {"raw": None if self._trained is None else self._by_name(self._trained)}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the trained weights, after the model and the optimizers."""
        self.start()
        with torch.no_grad():
            for name, parameter in self._by_name(self._parameters).items():
                parameter.copy_(tree["raw"][name])
        return None

    @property
    def _parameters(self) -> list[Tensor]:
        return parameters_in(*self._optimizers)

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str | int, Tensor]:
        """Return the tensors, in parameter order, by name; by number for parameters without a name."""
        names, nameless = parameter_names(self._modules), count()
        keys = [names.get(id(parameter)) for parameter in self._parameters]
        return {next(nameless) if key is None else key: tensor for key, tensor in zip(keys, tensors, strict=True)}

    def _switch_to_eval(self) -> None:
        for optimizer in self._optimizers:
            optimizer.eval()

    def _load_trained(self) -> None:
        # The switch computes the trained weights with rounding errors. The copies are exact.
        self.start()
        assert self._trained is not None
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._trained)


def _switches(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
