"""Calls a function of yours now and then during training, without a trace: to sample, draw or measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.durations import Duration, Epochs, check_duration
from trainwright.core.errors import message
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
