"""Measures a run between updates: by a function of yours, without a trace; by norms and zeros of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.durations import Duration, Epochs, Updates, check_duration
from trainwright.core.errors import SettingError, message
from trainwright.core.model_statistics import ModelStatistics
from trainwright.core.suggestions import suggests
from trainwright.protocols import Observer


class RunObserver(Observer):
    """An observer that measures the run itself at boundaries between updates, and changes nothing.

    It holds the settings; what it measures with is an `Inspector` of each run (`fit/inspection.py`), since a run is no
    concern of this package, and one observer may watch several.
    """

    name = ""
    """With its settings: all ranks must have it. Empty where rank 0 alone may."""


@suggests
class Probe(RunObserver):
    """Calls `fn(trainer)` each time `every` has passed; a dict of numbers that it returns is logged.

    The model is then in eval mode with the weights that count (averaged ones, where there are any), under no_grad and
    the run's autocast, and afterwards everything is as it was: modes, random state, `trainer.state`, gradients. The
    numbers are in the record of the next update, and in the epoch's row as means over its probes.
    """

    def __init__(self, fn: Callable[[Any], Mapping[str, float] | None], *, every: Duration = Epochs(1)) -> None:  # noqa: B008
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(
                message(f"Probe({fn!r})", want="a function of the trainer", fix="Probe(lambda trainer: ...)")
            )
        check_duration(every, "every", call="Probe({})")
        self.fn = fn
        self.duration = every
        self.name = f"Probe({getattr(fn, '__name__', repr(fn))})"


@suggests
class Statistics(RunObserver):
    """Has a run call `on_statistics` of all observers with its `ModelStatistics`, each `every` updates.

    They hold norm, maximum and zeros of each parameter of the model and of the gradient that it was moved by, and how
    far the update has moved it. `parameters`: a pattern of their names, such as "head.*". The numbers are of one
    update, computed on the device and read in one transfer; the weights are copied for that update. Others cost
    nothing. The journal and TensorBoard write them, and `latest` holds them. Of several processes rank 0
    measures; all need the same `Statistics`. SettingError for a model in shards, and where the pattern names nothing.
    """

    def __init__(self, *, every: Updates = Updates(100), parameters: str = "*") -> None:  # noqa: B008
        if not isinstance(every, Updates):
            what = f"Statistics(every={every!r})"
            raise SettingError(what, want="Updates(n)", fix="Statistics(every=Updates(100))")
        if not isinstance(parameters, str) or not parameters:
            what = f"Statistics(parameters={parameters!r})"
            raise SettingError(what, want="a pattern of names", fix='Statistics(parameters="head.*")')
        self.duration, self.parameters = every, parameters
        self.name = f"Statistics(every={every}, parameters={parameters!r})"
        self.latest: ModelStatistics | None = None
        """The last statistics."""

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Keep it."""
        self.latest = statistics
