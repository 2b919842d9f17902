"""MLflow: the numbers, settings and figures of a run, continued as the same run after a resume."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from trainwright.core.durations import Duration, Updates
from trainwright.core.plan import Plan
from trainwright.core.records import Result
from trainwright.core.suggestions import suggests
from trainwright.observers.loggers.base import Logger

_TAG, _MOST, _LONGEST, _REFUSED = "trainwright.run", 1000, 6000, re.compile(r"[^\w\-. :/]", re.ASCII)
"""The tag of a run, the numbers in one call, the characters of a setting, and the characters that no name may have."""


@suggests
class MLflowLogger(Logger):
    """Logs the numbers, settings and figures of a run to an MLflow server or a local store.

    Later stages and a resume continue the run with the tag `trainwright.run`; its settings are logged once. An update
    repeated after a resume has two points, equal on a CPU: MLflow cannot drop one. MLflow's active run is not used.

    Args:
        experiment: The experiment. It is created where none has this name.
        name: The name of the run; a random one by default.
        tracking_uri: `http://...`, or `sqlite:///mlflow.db` for a local store; by default MLflow's own setting.
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
        hyperparameters: Further settings to log, for example `vars(args)`.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        every: Duration = Updates(10),  # noqa: B008
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every=every, hyperparameters=hyperparameters, package="mlflow")
        self.experiment, self.name, self.tracking_uri, self.run_id = experiment, name, tracking_uri, ""

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Begin the run, or continue it."""
        import mlflow.entities

        self._client, self._metric = mlflow.MlflowClient(self.tracking_uri), mlflow.entities.Metric
        known = self._client.get_experiment_by_name(self.experiment)
        place = known.experiment_id if known is not None else self._client.create_experiment(self.experiment)
        found = [] if keep == -1 else self._client.search_runs([place], f"tags.`{_TAG}` = '{plan.run}'")
        run = found[0] if found else self._client.create_run(place, run_name=self.name, tags={_TAG: plan.run})
        self.run_id, self._numbers = run.info.run_id, list[Any]()
        self._client.update_run(self.run_id, status="RUNNING")
        for name, value in () if found else settings.items():  # MLflow refuses to change one
            self._client.log_param(self.run_id, _REFUSED.sub("_", name), str(value)[:_LONGEST])

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Add to the numbers that are sent together."""
        now = int(1000 * time.time())
        self._numbers += [self._metric(_REFUSED.sub("_", name), value, now, update) for name, value in numbers.items()]

    def write_figure(self, update: int, name: str, pixels: Any) -> None:
        """Log an image."""
        self._client.log_image(self.run_id, pixels, key=_REFUSED.sub("_", name), step=update)

    def flush(self) -> None:
        """Send the numbers."""
        numbers, self._numbers = self._numbers, []
        for first in range(0, len(numbers), _MOST):
            self._client.log_batch(self.run_id, metrics=numbers[first : first + _MOST])

    def close(self, result: Result | None) -> None:
        """Log how the run ended."""
        if result is not None:
            self._client.set_tag(self.run_id, "trainwright.stopped", result.stopped)
        self._client.set_terminated(self.run_id)
