"""Weights & Biases: the numbers, settings and figures of a run, continued as the same run after a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainwright.core.checks import local_path
from trainwright.core.durations import Duration, Updates
from trainwright.core.plan import Plan
from trainwright.core.records import Result
from trainwright.core.suggestions import suggests
from trainwright.observers.loggers.base import Logger


@suggests
class WandbLogger(Logger):
    """Logs the numbers, settings and figures of a run to Weights & Biases; `WANDB_MODE=offline` keeps them on the disk.

    Further stages and a resume from the run's checkpoint continue the same run: it has the id of the checkpoints. W&B
    cannot drop points: an update repeated after a resume has two, which are equal on a CPU. The x-axis of all charts is
    `update`. Code, command line, git and console output are not sent.

    Args:
        project: The project.
        name: The name of the run; a random one by default.
        directory: Where the folder `wandb` is made; by default where the program runs.
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
        hyperparameters: Further settings to log, for example `vars(args)`.
        run: A run of `wandb.init` of your own, with its own project, name and settings; it is not finished.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        directory: str | os.PathLike[str] = ".",
        every: Duration = Updates(10),  # noqa: B008
        hyperparameters: Mapping[str, Any] | None = None,
        run: Any = None,
    ) -> None:
        super().__init__(every=every, hyperparameters=hyperparameters, package="wandb")
        self.project, self.name, self.directory = project, name, local_path(directory, "WandbLogger(directory={})")
        self.run, self._is_own = run, run is None

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Begin the run, or continue it."""
        if self._is_own:
            self.run = self._init(plan.run)
        self.run.define_metric("*", step_metric="update")
        self.run.config.update(dict(settings), allow_val_change=True)

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Log a row."""
        self.run.log({"update": update, **numbers})

    def write_figure(self, update: int, name: str, pixels: Any) -> None:
        """Log an image."""
        import wandb

        self.run.log({"update": update, name: wandb.Image(pixels)})

    def close(self, result: Result | None) -> None:
        """Log the best number and the end; finish the run, which waits for uploads."""
        if result is not None:
            best = {} if result.best is None else {f"best_{result.best.name}": result.best.value}
            self.run.summary.update({"stopped": result.stopped, **best})
        if self._is_own:
            self.run.finish()

    def _init(self, run: str) -> Any:
        import wandb

        os.makedirs(self.directory, exist_ok=True)  # it takes a temporary one where there is none
        settings = wandb.Settings(console="off", quiet=True, finish_timeout=60, disable_git=True, disable_code=True)
        settings.x_disable_meta = True  # the command line, paths and names of user and machine
        which: dict[str, Any] = {"project": self.project, "name": self.name, "id": run, "dir": str(self.directory)}
        return wandb.init(**which, resume="allow", reinit="create_new", settings=settings)
