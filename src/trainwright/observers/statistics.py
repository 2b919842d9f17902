"""Asks for statistics of weights, gradients and updates, parameter by parameter, at an interval."""

from __future__ import annotations

from trainwright.core.durations import Updates
from trainwright.core.errors import SettingError
from trainwright.core.model_statistics import ModelStatistics
from trainwright.core.suggestions import suggests
from trainwright.observers.probes import RunObserver


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
