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
from trainwright.observers.loggers.base import Logger, require

_MOST, _LONGEST, _SECONDS = 1000, 6000, 5.0
"""Numbers that MLflow takes in one call, characters of a setting, and seconds between two calls."""
_TAG = "trainwright.run"


@suggests
class MLflowLogger(Logger):
    """Logs the numbers, settings and figures of a run to an MLflow server or a local store.

    Numbers are sent about every 5 seconds, and at each validation, save and end. Further stages and a resume from the
    run's checkpoint continue the same run, which is found by its tag `trainwright.run`; settings are logged once. What
    was logged after the update of a resume cannot be dropped there: these updates have two points each, which are equal
    on a CPU. MLflow's active run is neither used nor changed.

    Args:
        experiment: The experiment, which is made where there is none of this name.
        name: The name of the run; a random one by default.
        tracking_uri: `http://...`, or `sqlite:///mlflow.db` for a local store; by default MLflow's own setting.
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
        hyperparameters: Further settings to log, for example `vars(args)`.

    Raises:
        SettingError: Without the package mlflow.
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
        super().__init__(every=every, hyperparameters=hyperparameters)
        require("mlflow", "MLflowLogger")
        self.experiment, self.name, self.tracking_uri = experiment, name, tracking_uri
        self.run_id, self._numbers, self._sent = "", list[Any](), 0.0
        self._client: Any = None

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Begin the run, or continue it."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        place = client.create_experiment(self.experiment) if known is None else known.experiment_id
        found = [] if keep == -1 else client.search_runs([place], f"tags.`{_TAG}` = '{plan.run}'")
        run = found[0] if found else client.create_run(place, run_name=self.name, tags={_TAG: plan.run})
        self.run_id, self._numbers = run.info.run_id, []
        client.update_run(self.run_id, status="RUNNING")
        for name, value in () if found else settings.items():  # MLflow refuses to change one
            client.log_param(self.run_id, _allowed(name), str(value)[:_LONGEST])

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Add to the numbers that are sent together."""
        from mlflow.entities import Metric

        now = time.time()
        self._numbers += [Metric(_allowed(name), value, int(1000 * now), update) for name, value in numbers.items()]
        if now - self._sent >= _SECONDS or len(self._numbers) >= _MOST:
            self.flush()

    def write_figure(self, update: int, name: str, pixels: Any) -> None:
        """Log an image."""
        self._client.log_image(self.run_id, pixels, key=_allowed(name), step=update)

    def flush(self) -> None:
        """Send the numbers."""
        numbers, self._numbers, self._sent = self._numbers, [], time.time()
        for first in range(0, len(numbers), _MOST):
            self._client.log_batch(self.run_id, metrics=numbers[first : first + _MOST])

    def close(self, result: Result | None) -> None:
        """Send the numbers and how the run ended."""
        self.flush()
        if result is not None:
            self._client.set_tag(self.run_id, "trainwright.stopped", result.stopped)
        self._client.set_terminated(self.run_id)


def _allowed(name: str) -> str:
    """Return a name with `_` in place of characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
