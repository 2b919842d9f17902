"""What all loggers share: records as named numbers, the settings of a run, and failures that never stop it."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

from trainwright.core.durations import Duration, Seconds, Updates
from trainwright.core.errors import SettingError, first_line, warn_user
from trainwright.core.plan import Plan
from trainwright.core.records import Result, Saved, Update, Validation
from trainwright.protocols import Observer

if TYPE_CHECKING:
    from trainwright.observers.probes import ModelStatistics
    from trainwright.observers.throughput import Speed

_FLUSH_SECONDS = 5.0
_FACTS = ("parameters", "frozen", "device", "train", "val", "rows", "batch_size", "epochs", "max_updates")


class Logger(Observer):
    """Turns the records of a run into named numbers for a tracker of experiments: the base class of all loggers.

    The step of a number is its update, counted over all stages. An update has `loss`, `lr`, `grad_norm` where it is
    measured, and each named number; a validation or an epoch has `val_...`, and the means of training since the epoch
    began as `epoch/...`. Skipped updates have no step. The settings are logged when the first number is: those of the
    trainer, of the data and of the optimizers, as text and numbers; never environment variables or the command line.

    An error of the tracker does not stop the run. It is a warning, once, and logging continues at the next validation;
    where the tracker could not be opened, at the next `fit`. `sys.excepthook`, `sys.exit` and Python's random state
    are restored after each call.

    A logger for another tracker overrides `open`, `write`, `flush`, `close` and, for figures, `write_figure`.

    Args:
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
        hyperparameters: Further settings to log, for example `vars(args)`.
        package: The package of the tracker, which is also the name of its extra. No package by default.

    Raises:
        SettingError: Without the package of the tracker.
    """

    def __init__(
        self,
        *,
        every: Duration = Updates(10),  # noqa: B008
        hyperparameters: Mapping[str, Any] | None = None,
        package: str = "",
    ) -> None:
        name = type(self).__name__
        if not isinstance(every, Updates | Seconds):
            fix = f"{name}(..., every=Updates(10))"
            raise SettingError(f"{name}(every={every!r})", want="Updates(n) or Seconds(n)", fix=fix)
        if package:
            _require(package, name)
        self.every, self.hyperparameters = every, dict(hyperparameters or {})
        self._plan = Plan()
        self._keep: int | None = -1
        """The update up to which earlier records stay when the tracker is opened, -1 for none; None: all."""
        self._resumes = False
        self._is_open = self._is_off = self._warned = False
        self._validated, self._flushed = -1, 0.0

    # For subclasses.

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Open the tracker and log the settings of the run `plan.run`.

        `keep`: what was written after this update is to be dropped; -1 for a run that begins, None for nothing to drop.
        """
        raise NotImplementedError

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Log numbers with an update as their step."""
        raise NotImplementedError

    def write_figure(self, update: int, name: str, pixels: Any) -> None:
        """Log a picture: bytes (height, width, 4) as a NumPy array."""
        what = f"{type(self).__name__}.log_figure({name!r}, ...): it logs no figures"
        raise SettingError(what, fix='figure.savefig("figure.png")')

    def flush(self) -> None:
        """Send buffered numbers: about every 5 seconds, at each validation and save, and before `close`. No-op here."""

    def close(self, result: Result | None) -> None:
        """Close the tracker; `result` of a `fit` that has ended."""

    # For users.

    def log_figure(self, name: str, figure: Any, *, update: int) -> None:
        """Log a matplotlib figure with an update as its step, for example in a `Probe`."""
        if type(self).write_figure is Logger.write_figure:
            self.write_figure(update, name, None)  # refuses it
        self._log(lambda: self.write_figure(update, name, _pixels(figure)))

    # Events.

    def resume_at(self, update: int, skipped: int = 0, *, continues: bool = True) -> None:
        """Note where the run resumes: what was logged after it is dropped when the tracker is opened."""
        self._close(None)
        self._keep, self._resumes = update, True

    def on_fit_start(self, plan: Plan) -> None:
        """Store the plan; the first number opens the tracker."""
        self._close(None)
        if plan.run != self._plan.run and not self._resumes:
            self._keep = -1
        self._plan, self._resumes, self._validated = plan, False, -1
        self._is_off = self._warned = False

    def on_update(self, update: Update) -> None:
        """Log an update that was applied; a skipped one has no step of its own."""
        if update.skipped:
            return
        numbers = {"loss": update.loss, "lr": update.lr, **update.values}
        if update.grad_norm is not None:
            numbers["grad_norm"] = update.grad_norm
        if update.loss_scale is not None:
            numbers["loss_scale"] = update.loss_scale
        if len(update.lrs) > 1:
            numbers |= {f"lr/group_{group}": rate for group, rate in enumerate(update.lrs)}
        self._write(update.update, numbers)

    def on_validate(self, record: Validation) -> None:
        """Log a validation; the one at an early end as `final/...`, apart from the curves that a resume continues."""
        self._validated = record.update
        self._is_off = self._is_off and not self._is_open  # after an error: once more
        rates = ("epoch", "update", "lr")
        means = {name: value for name, value in record.metrics.items() if name not in rates and name[:3] != "lr_"}
        numbers = {name if name.startswith("val_") else f"epoch/{name}": value for name, value in means.items()}
        if record.final:
            numbers = {f"final/{name}": value for name, value in means.items()}
        self._write(record.update, numbers | ({"skipped": record.skipped} if record.skipped else {}))
        self._flush()

    def on_epoch(self, record: Validation) -> None:
        """Log an epoch, unless the validation at its end was logged."""
        if record.update != self._validated:
            self.on_validate(record)

    def on_speed(self, speed: Speed) -> None:
        """Log the speed of training."""
        names = ("rows_per_second", "updates_per_second", "waiting", "mfu")
        speeds = {f"speed/{name}": value for name in names if (value := getattr(speed, name)) is not None}
        self._write(speed.update, speeds | {f"memory/{kind}": size for kind, size in speed.memory.items()})

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Log statistics of weights, gradients and an update, by parameter."""
        names = ("weight_norm", "weight_max", "weight_zeros", "grad_norm", "grad_max", "grad_zeros", "update_ratio")
        values = [(kind, name, getattr(one, kind)) for name, one in statistics.parameters.items() for kind in names]
        self._write(statistics.update, {f"{kind}/{name}": value for kind, name, value in values if value is not None})

    def on_save(self, saved: Saved) -> None:
        """Flush: a run that resumes from this checkpoint finds the numbers before it."""
        if self._is_open:
            self._flush()

    def on_fit_end(self, result: Result) -> None:
        """Close the tracker."""
        self._close(result)

    def _write(self, update: int, numbers: Mapping[str, float]) -> None:
        self._log(lambda: self.write(update, numbers))
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self._log(self.flush)

    def _log(self, action: Callable[[], None]) -> None:
        """Do it, and open the tracker before."""
        if self._is_off:
            return
        if not self._is_open:
            facts = {name: value for name in _FACTS if (value := getattr(self._plan, name)) not in (None, "")}
            settings = {**facts, **self._plan.hyperparameters, **self.hyperparameters}
            self._attempt(lambda: self.open(self._plan, settings, keep=self._keep))
            if self._is_off:
                return
            self._is_open, self._keep = True, None
        self._attempt(action)

    def _close(self, result: Result | None) -> None:
        if self._is_open:
            self._is_open = False
            self._attempt(self.flush)
            self._attempt(lambda: self.close(result))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do it. An exception of a tracker, a disk or a network is a warning: the run goes on without the logger."""
        state = random.getstate()  # MLflow draws the names of runs
        hooks = sys.excepthook, sys.exit  # W&B replaces both to note how the process ends
        try:
            action()
        except Exception as error:
            self._is_off = True
            if not self._warned:
                self._warned = True
                warn_user(f"{type(self).__name__} failed, and the run continues without it: {first_line(error)}")
        finally:
            random.setstate(state)
            sys.excepthook, sys.exit = hooks


def _require(package: str, logger: str) -> None:
    """Raise SettingError, which names the extra, where a package is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name, such as the `wandb` of earlier runs, has no origin
        what = f"{logger}(...) without the package {package}"
        raise SettingError(what, fix=f'pip install {package}   # or pip install ".[{package}]" in the clone')


def _pixels(figure: Any) -> Any:
    import numpy as np
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return np.asarray(Image.open(buffer).convert("RGBA"))
