"""TensorBoard: a run as event files, continued in the same directory after a resume."""

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
class TensorBoardLogger(Logger):
    """Writes the numbers, settings and figures of a run to event files in a directory: `tensorboard --logdir runs`.

    A directory shows one run: a resumed one hides events after the update that it resumes from, and a new one hides
    earlier events. The settings are in the tab HParams, beside the losses and the numbers that slots compare.

    Args:
        directory: Where the event files are written.
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
        hyperparameters: Further settings to log, for example `vars(args)`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: Duration = Updates(10),  # noqa: B008
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every=every, hyperparameters=hyperparameters, package="tensorboard")
        self.directory = local_path(directory, "TensorBoardLogger({})")
        self._writer: Any = None

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Open a new event file, which hides events of earlier ones after `keep`."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(self.directory), purge_step=None if keep is None else keep + 1, flush_secs=10)
        plain = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
        shown = dict.fromkeys(("loss", *(["val_loss"] if plan.val else []), *plan.watched), 0.0)
        for summary in hparams(plain, shown):  # `add_hparams` would write them to a directory of their own
            self._writer.file_writer.add_summary(summary)

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, update)

    def write_figure(self, update: int, name: str, pixels: Any) -> None:
        """Write an image."""
        self._writer.add_image(name, pixels, update, dataformats="HWC")

    def flush(self) -> None:
        """Flush the event file."""
        self._writer.flush()

    def close(self, result: Result | None) -> None:
        """Close the event file."""
        self._writer.close()
