"""The Protocols that a user's own class can fill (parts of a checkpoint, slots of the loop), and `Observer`."""

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
"""None, bool, int, float, str, bytes, tensor, ndarray, list, tuple, dict with str or int keys."""


@runtime_checkable
class Stateful(Protocol):
    """Something with state that belongs in a checkpoint."""

    def state_dict(self) -> Tree:
        """The state as plain data and tensors."""

    def load_state_dict(self, tree: Tree, /) -> Any:
        """Take over a state that `state_dict` gave."""


class Clip(Protocol):
    """Limits the unscaled gradients of one update, in place."""

    def __call__(self, parameters: list[Tensor], /) -> Tensor | None:
        """Clip the `.grad` of `parameters`; return their total norm before clipping, or None."""


class Schedule(Protocol):
    """A learning-rate schedule: the settings. `bind` makes the object with state, which sets the rates of a run."""

    def bind(self, optimizer: Optimizer, plan: Plan) -> BoundSchedule:
        """The rates of this optimizer over this plan; SettingError where the plan contradicts the settings."""
        ...


class Metric(Protocol):
    """A metric with state of its own; each pass runs a copy.

    A checkpoint holds its `state_dict()`, where it has one beside `load_state_dict(tree)`, else its attributes. With
    several processes each updates a copy with its own rows, and `merge(other)` is needed too: it adds what another
    object of the class was updated with. Rank 0 then calls `compute`. Metrics of torchmetrics whose states are summed,
    maxima, minima or lists, and those of torcheval, need none.
    """

    def update(self, output: Any, target: Any) -> None:
        """Add one batch, detached from the graph."""

    def compute(self) -> Any:
        """Return the number so far, or a dict of numbers."""

    def reset(self) -> None:
        """Start again without rows."""


class Observer:
    """Watches a run: gets read-only records of plain numbers and cannot change anything.

    Override any of the methods. A method `on_...` that is not one of them is refused when the class is defined.
    """

    wants: ClassVar[frozenset[str]] = frozenset()
    """Numbers that cost something and are computed only where asked for: "grad_norm"."""
    every: Duration | None = None
    """How often `on_update` is called: `Updates(n)` or `Seconds(n)`; None: at every update. Read once, before `fit`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_near_names(cls, EVENTS, base=Observer, prefix="on_")
        if unknown := set(cls.wants) - {"grad_norm"}:
            raise TypeError(f"{cls.__name__}.wants: {', '.join(sorted(unknown))}: only 'grad_norm' can be asked for")

    def resume_at(self, update: int, skipped: int = 0, *, continues: bool = True) -> None:
        """Drop what was written after `update`: the run resumes there. Called before `on_fit_start`; no-op here.

        `skipped`: the skipped updates of the stage so far. `continues`: whether the run trains further; False where it
        had finished and only its result is loaded.
        """

    def on_fit_start(self, plan: Plan) -> None:
        """Before the first update."""

    def on_update(self, update: Update) -> None:
        """After every update."""

    def on_speed(self, speed: Speed) -> None:
        """How fast a stretch of training went: each time that a `Throughput` among the observers asks for it."""

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """What weights, gradients and an update look like: where a `Statistics` among the observers asks for it."""

    def on_validate(self, record: Validation) -> None:
        """After every validation."""

    def on_epoch(self, record: Validation) -> None:
        """After every finished epoch, and its validation; also where a run ends inside an epoch without one."""

    def on_save(self, saved: Saved) -> None:
        """When a checkpoint is complete on disk."""

    def on_fit_end(self, result: Result) -> None:
        """After the last update, also when the run ends in an error."""


EVENTS = (
    *("on_epoch", "on_fit_end", "on_fit_start", "on_save", "on_speed", "on_statistics"),
    *("on_update", "on_validate"),
)


def listeners(observers: Sequence[Observer], event: str) -> list[Any]:
    """The bound `event` methods of those observers that really override it."""
    return [
        getattr(observer, event)
        for observer in observers
        if getattr(type(observer), event) is not getattr(Observer, event)
    ]
