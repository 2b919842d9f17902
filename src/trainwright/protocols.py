"""The protocols that user classes can implement (parts of checkpoints, slots of the loop), and `Observer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.durations import Duration
from trainwright.core.plan import Plan
from trainwright.core.records import Result, Saved, Update, Validation
from trainwright.core.suggestions import refuse_near_names

if TYPE_CHECKING:
    from trainwright.observers.probes import ModelStatistics
    from trainwright.observers.throughput import Speed
    from trainwright.schedules.bound import BoundSchedule

Tree = Any
"""Nested state: None, bool, int, float, str, bytes, tensor, ndarray, list, tuple, dict with str or int keys."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> Tree:
        """Return the state as plain data and tensors."""

    def load_state_dict(self, tree: Tree, /) -> Any:
        """Load a state that `state_dict` has returned."""


class Clip(Protocol):
    """Clips the unscaled gradients of one update."""

    def __call__(self, parameters: list[Tensor], /) -> Tensor | None:
        """Clip the `.grad` of `parameters` in place; return their total norm before clipping, or None."""


class Schedule(Protocol):
    """The settings of a learning-rate schedule; `bind` makes the object with state that sets the rates of a run."""

    def bind(self, optimizer: Optimizer, plan: Plan) -> BoundSchedule:
        """Return the schedule of an optimizer for a plan; SettingError if the plan contradicts the settings."""
        ...


class Metric(Protocol):
    """A metric with state. Each pass over data uses a copy of the object.

    A checkpoint holds its `state_dict()` if it also has `load_state_dict(tree)`, else its attributes. With several
    processes, each one updates a copy with its own rows, and a method `merge(other)` is required: it adds the state of
    another object of the class. Rank 0 then calls `compute`. Metrics of torcheval need no `merge`, nor do those of
    torchmetrics whose states are reduced by sum, maximum, minimum or concatenation.
    """

    def update(self, output: Any, target: Any) -> None:
        """Add one batch of detached tensors."""

    def compute(self) -> Any:
        """Return the value so far: a number, or a dict of numbers."""

    def reset(self) -> None:
        """Reset to the state without rows."""


class Observer:
    """Base class of observers: objects that receive read-only records of plain numbers during a run.

    Subclasses override any of the methods. Any other method `on_...` raises TypeError when the class is defined.
    """

    wants: ClassVar[frozenset[str]] = frozenset()
    """Numbers that are computed only on request because of their cost: "grad_norm"."""
    every: Duration | None = None
    """The interval of `on_update`: `Updates(n)` or `Seconds(n)`; None: every update. Read once, before `fit`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_near_names(cls, EVENTS, base=Observer, prefix="on_")
        if unknown := set(cls.wants) - {"grad_norm"}:
            raise TypeError(f"{cls.__name__}.wants: {', '.join(sorted(unknown))}: only 'grad_norm' can be asked for")

    def resume_at(self, update: int, skipped: int = 0, *, continues: bool = True) -> None:
        """Discard records after `update`, where the run resumes. Called before `on_fit_start`. No-op here.

        `skipped`: the skipped updates of the stage so far. `continues`: whether the run trains further; False if it had
        finished, so that only its result is loaded.
        """

    def on_fit_start(self, plan: Plan) -> None:
        """Called before the first update."""

    def on_update(self, update: Update) -> None:
        """Called after every update, or at the interval `every`."""

    def on_speed(self, speed: Speed) -> None:
        """Called with the speed of a part of the training, at the interval of a `Throughput` among the observers."""

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Called with statistics of weights, gradients and updates, at the interval of a `Statistics` observer."""

    def on_validate(self, record: Validation) -> None:
        """Called after every validation."""

    def on_epoch(self, record: Validation) -> None:
        """Called after every finished epoch and its validation, and if a run ends inside an epoch without one."""

    def on_save(self, saved: Saved) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_fit_end(self, result: Result) -> None:
        """Called after the last update, also if the run ends with an error."""


EVENTS = (
    *("on_epoch", "on_fit_end", "on_fit_start", "on_save", "on_speed", "on_statistics"),
    *("on_update", "on_validate"),
)


def listeners(observers: Sequence[Observer], event: str) -> list[Any]:
    """Return the bound `event` methods of the observers that override it."""
    return [
        getattr(observer, event)
        for observer in observers
        if getattr(type(observer), event) is not getattr(Observer, event)
    ]
