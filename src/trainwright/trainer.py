"""The loop: fit, update, compute_gradients, apply_gradients, and the hooks that a subclass may override."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.device import move
from trainwright.core.durations import Duration
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.progress import Counters, Progress
from trainwright.core.records import Count, Result, StepOutput
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import (
    point_elsewhere,
    points_elsewhere,
    refuse_near_names,
    refuse_unused_helpers,
    suggests,
)
from trainwright.fit import arguments
from trainwright.fit.plan import EACH_EPOCH, Ends, ResumeArgs, make_plan, settings_of
from trainwright.fit.record import NOT_RUNNING, StageRecord
from trainwright.metrics.metric_set import MetricSet
from trainwright.observers.console import Console, console_observers
from trainwright.observers.live import write_line
from trainwright.optim.clip import as_clip
from trainwright.optim.named import ONLY, by_name, check_schedulers, make_optimizers, warn_of_one_rate
from trainwright.precision.base import Precision
from trainwright.precision.mixed_precision import as_precision
from trainwright.protocols import Clip, Observer, Schedule, Stateful
from trainwright.update import batches, manual_optimization
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.nonfinite_policy import Policy, as_policy
from trainwright.update.trainer_like import overridden
from trainwright.update.window import Window, accumulation, rows_of

if TYPE_CHECKING:
    from trainwright.acceleration.fast import Fast
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.distributed.ddp import DDP
    from trainwright.distributed.fsdp import FSDP
    from trainwright.evaluation.reports import Report, ReportKind
    from trainwright.fit.boundary import Boundary
    from trainwright.fit.early_stopping import EarlyStopping
    from trainwright.fit.run import Run
    from trainwright.optim.averaging import WeightAveraging

M = TypeVar("M", bound=nn.Module)

HOOKS = (
    *("training_step", "validation_step", "predict_step", "split", "count", "to_device"),
    *("begin_epoch", "end_epoch", "after_update"),
    *("update", "compute_gradients", "apply_gradients", "evaluate", "parts"),
)
METHODS = (
    *("fit", "minimize", "autocast", "predict", "predict_batches", "report", "plan"),
    *("save", "save_weights", "stop", "log", "print"),
)


class Trainer(Generic[M]):
    """Trains a model; slots add precision, accumulation, clipping, a schedule, early stopping and checkpoints.

    With all slots empty the loop is the plain PyTorch loop. Subclasses override hooks, such as `training_step`.

    >>> import torch
    >>> from trainwright import Trainer
    >>> model = torch.nn.Linear(8, 1)
    >>> trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), console=False)
    >>> result = trainer.fit((torch.randn(64, 8), torch.randn(64, 1)), epochs=2, batch_size=16)
    >>> result.updates, result.stopped
    (8, 'epochs=2 reached')

    Args:
        model: Any module. It is moved to `device`.
        optimizer: An `Optimizer`, a function `model -> Optimizer`, a torch class or a partial of one, or a dict of
            these by name. None: the trainer only evaluates and predicts.
        loss: A function `loss(output, target)`. None: the steps are overridden, or the model returns a loss.
        metrics: Metrics by name: functions of (output, target), objects with `update`, `compute` and `reset`, or
            `Derived`.
        precision: "bf16", "fp16", "tf32", "auto", `MixedPrecision` or a custom `Precision`. None: that of the model.
        accumulate: Micro-batches per update, or a dict `{first epoch: micro-batches}`.
        clip: The maximum norm, `ClipNorm`, `ClipValue` or a function of the parameters. With several optimizers a dict
            by their names.
        schedule: A schedule, or a function `(update, updates) -> factor` of the learning rate. With several optimizers
            a dict by their names.
        early_stopping: `EarlyStopping(...)`.
        checkpoint: `Checkpoint(...)`.
        average: `EMA(...)` or `SWA(...)`. The averaged weights are evaluated, saved, and loaded into the model at the
            end.
        frozen: Untrained modules by name, such as a teacher. They are moved to the device and stay in eval mode.
        on_nonfinite: The action for an update with a non-finite loss or gradient: "raise", "skip" or "ignore".
        parallel: "auto" uses all processes of the launch with `DDP()`. `DDP(...)` or `FSDP(...)`: with these settings.
            None: one process.
        device: A device. "auto": that of the model, or the best available one.
        console: False prints nothing. `Console(...)` sets stream and width.
        observers: A sequence of observers, such as `Journal(...)`.
        on_error: "save" saves the last complete update when user code raises. Requires a `checkpoint`.
        on_oom: "split" repeats an update with smaller micro-batches when memory runs out.
        fast: `Fast(...)`: compilation, memory layout, data on the device.

    Attributes:
        device: The device of the model.
        optimizers: The optimizers by name; a single one is also `optimizer`.
        history: One dict of numbers per epoch or validation.
        result: The `Result` of the last `fit`, or None.
        state: A dict for the user, saved in every checkpoint.
        is_main: Whether this process has rank 0.
        world: The ranks of the run: `world.rank`, `world.size`.

    Raises:
        SettingError: For invalid settings, alone or in combination.
    """

    @suggests
    def __init__(
        self,
        model: M,
        optimizer: Optimizer | Callable[..., Optimizer] | Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        precision: str | Precision | None = None,
        accumulate: int | Mapping[int, int] = 1,
        clip: float | Clip | Mapping[str, Any] | None = None,
        schedule: Schedule | Callable[[int, int], float] | Mapping[str, Any] | None = None,
        early_stopping: EarlyStopping | None = None,
        checkpoint: Checkpoint | None = None,
        average: WeightAveraging | None = None,
        frozen: Mapping[str, nn.Module] | None = None,
        on_nonfinite: str = "raise",
        parallel: str | DDP | FSDP | None = "auto",
        device: str | torch.device = "auto",
        console: bool | Console = True,
        observers: Sequence[Observer] = (),
        on_error: str | None = None,
        on_oom: str | None = None,
        fast: Fast | None = None,
    ) -> None:
        refuse_unused_helpers(type(self), [*HOOKS, *METHODS], base=Trainer)
        self.fast = arguments.checked_fast(fast)
        self.world, self.parallel, self.device = arguments.processes(parallel, device, arguments.checked_model(model))
        self.is_main = self.world.is_main
        self.model: M = model
        self.loss = arguments.checked_loss(loss)
        self.frozen = arguments.checked_frozen(frozen, model)
        arguments.place_all(self, loss, *self.frozen.values())
        self.precision = as_precision(precision, self.device)
        if self.precision is not None:
            self.precision.prepare_model(model)
        self.optimizers = make_optimizers(optimizer, model, fuses=self.fast.defaults)
        self.metrics = arguments.checked_metrics(metrics, self.world)
        arguments.check_shards(self)
        self.accumulate = accumulation(accumulate)
        self.clip: Any = by_name(clip, as_clip, slot="clip", optimizers=self.optimizers)
        self.schedule: Any = by_name(schedule, arguments.checked_schedule, slot="schedule", optimizers=self.optimizers)
        check_schedulers(self.schedule, self.optimizers)
        warn_of_one_rate(self.schedule, self.optimizers)
        self.early_stopping = arguments.checked_slot("early_stopping", early_stopping, 'EarlyStopping("val_loss")')
        self.checkpoint = arguments.checked_slot("checkpoint", checkpoint, 'Checkpoint("runs/1")')
        self.average = arguments.checked_slot("average", average, "EMA(0.999)")
        self.on_nonfinite: Policy = as_policy(on_nonfinite)
        self.on_error = arguments.checked_on_error(on_error, checkpoint)
        own = overridden(type(self), Trainer, HOOKS)
        self.on_oom = arguments.checked_on_oom(on_oom, self.world, own=own)
        self.observers: Sequence[Observer] = (*console_observers(console), *arguments.checked_observers(observers))
        self._hooks = arguments.bound_hooks(self, own)
        arguments.check_closures(self)
        checked = set() if self.is_main else set(self.metrics)
        self._record = StageRecord(checked_metrics=checked)
        self._tracker = LossTracker(
            MetricSet(self.metrics, training=True, checked=checked) if self.metrics else None, self._hooks
        )
        self._counters, self.history = Counters(), list[dict[str, float]]()
        self.state: dict[str, Any] = {}
        self.result: Result | None = None
        self._run: Run = NOT_RUNNING
        self._boundary: Boundary = NOT_RUNNING

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_near_names(cls, [*HOOKS, *METHODS], base=Trainer)

    # The loop: four methods, to be read downwards.

    @suggests
    def fit(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | None = None,
        max_updates: int | None = None,
        max_seconds: float | None = None,
        epoch_updates: int | None = None,
        batch_size: int | None = None,
        validate: Duration = EACH_EPOCH,
        validate_at_start: bool = False,
        max_val_batches: int | None = None,
        resume: str | Path | None = None,
        resume_data: bool = True,
        resume_fresh: Sequence[str] = (),
    ) -> Result:
        """Train until an end is reached or a stop is requested; return the result.

        At least one of `epochs`, `max_updates` and `max_seconds` is required.

        Args:
            train: `batches(...)`, a `DataLoader`, a `Dataset`, an array or a tuple of arrays (these two with
                `batch_size`), an iterable of batches, or a function `epoch -> one of these`. None: a custom
                `training_step` or `update` makes the data; its batch is None.
            val: Validation data of the same forms, or a dict of several sets.
            epochs: End after this number of passes over the training data.
            max_updates: End after this number of applied updates.
            max_seconds: End after this number of seconds.
            epoch_updates: Updates per epoch, for an endless stream.
            batch_size: Rows per batch, for arrays and data sets.
            validate: Duration between evaluations of `val`. It is also evaluated at the end.
            validate_at_start: Evaluate `val` before the first update too, as epoch 0.
            max_val_batches: Evaluate only this number of first batches of each validation set.
            resume: "auto" continues from the newest checkpoint, if there is one. A path continues from that checkpoint.
            resume_data: False resumes with other data: the epoch starts again.
            resume_fresh: Names of parts that start fresh, such as `("schedule", "average")`.

        Raises:
            SettingError: Before the first update, for contradictory settings.
            DataError: For data that cannot be trained on.
            NonFiniteError: For a non-finite loss or gradient, with `on_nonfinite="raise"`.
            CheckpointError: If a checkpoint cannot be resumed, or if the save at the end fails.
            Stopped: After SIGTERM or SIGUSR1. The current update is completed and saved first.
            KeyboardInterrupt: After Ctrl-C, likewise.
        """
        # Imported on the first call, so that `import trainwright` stays cheap.
        from trainwright.fit.context import FitContext

        ends = Ends(epochs, max_updates, max_seconds, epoch_updates, validate, validate_at_start, max_val_batches)
        resuming = ResumeArgs(resume, resume_data, resume_fresh)
        with FitContext(self, train, val, batch_size=batch_size, ends=ends, resume=resuming) as (run, boundary):
            counters, strategy = run.counters, run.strategy
            while not counters.stopped:
                for window in run.start_epoch():
                    for schedule in run.schedules.values():
                        schedule.apply(counters.updates)
                    strategy.update(window)
                    applied = run.finish_update(window)
                    if applied and run.after_update is not None:
                        run.after_update()
                    if applied and run.average is not None:
                        run.average.take(counters.updates)
                    if strategy.reports:
                        strategy.report(window)
                    if counters.updates >= run.next_boundary and not run.at_epoch_end:  # else once, below
                        self._between_updates(boundary)
                if run.epoch_over or run.at_boundary:
                    self._between_updates(boundary, epoch_ended=run.epoch_over)
        assert self.result is not None
        return self.result

    def update(self, window: Window) -> Any:
        """Make one optimizer update from one window of micro-batches. Override it for GANs, SAM or L-BFGS.

        Args:
            window: The micro-batches of the update.

        Returns:
            The loss, a dict of numbers, or None.
        """
        loss = self.compute_gradients(window)
        self.apply_gradients()
        return loss

    def compute_gradients(self, window: Window) -> Tensor:
        """Zero the gradients, run each micro-batch forward and backward with its weight, and return the window's loss.

        Args:
            window: The micro-batches of the update.
        """
        run, strategy, tracker = self._run, self._run.strategy, self._tracker
        run.gradients.zero()
        if window.begun:
            tracker.start_extra_pass()
        window.begun = True
        for batch in window:
            with run.autocast:
                returned = strategy.step(batch)  # training_step, wrapped by DDP with several ranks
            losses, grad_tensors = strategy.backward_args(returned)  # a grad_tensor is the weight of its loss
            torch.autograd.backward(losses, grad_tensors)
        tracker.recording = True
        # The loss of a single micro-batch was divided by its own count: no factor is missing.
        complete = window.is_single and run.scaler is None
        loss: Tensor = tracker.window_loss if complete else strategy.finish_backward(window)
        return loss

    def apply_gradients(self, name: str | None = None, closure: Callable[[], Any] | None = None) -> bool:
        """Unscale the gradients, measure and clip them, check for NaN and inf, and step.

        The pass that unscales also flags NaN and inf. With a deferred check, the optimizer kernels skip the step by
        that flag.

        Args:
            name: The name of one of several optimizers. None: all of them.
            closure: For optimizers that evaluate the loss, such as L-BFGS: `apply_gradients(closure=lambda:
                self.compute_gradients(window))`.

        Returns:
            Whether the update was applied. Always True with a deferred check.
        """
        run = self._run
        if closure is not None:
            return manual_optimization.step_by_closure(run, closure, name)
        chosen = run.optimizer_steps.all if name is None else run.optimizer_steps.choose(name)
        found_inf = run.strategy.unscale_and_check(chosen.gradients)
        for optimizer_step in chosen.steps:
            if optimizer_step.measures_or_clips:
                optimizer_step.measure_and_clip()
        applied = run.strategy.check(found_inf, chosen)
        if applied:
            for optimizer_step in chosen.steps:
                optimizer_step.step()
        return applied

    def minimize(self, loss: Any, name: str | None = None) -> bool:
        """Zero the gradients of one optimizer, run `loss` backward, and apply the gradients. For the updates of a GAN.

        Args:
            loss: Any value that a step may return. A tensor has the rows of the window as its count.
            name: The name of one of several optimizers.

        Returns:
            Whether the update was applied.
        """
        run = self._run
        run.strategy.status.minimizing = manual_optimization.backward_of(run, loss, name)
        return self.apply_gradients(name)

    def _between_updates(self, boundary: Boundary, *, epoch_ended: bool = False) -> None:
        """Do the work that is due between two updates: probe, validate, compare with the best, report, save."""
        boundary.begin(epoch_ended=epoch_ended)
        validated = boundary.validation_is_due()
        is_best = save_due = False
        if validated or epoch_ended or boundary.ends_inside_epoch:
            row = boundary.add_row(boundary.validate() if validated else None)
            is_best, save_due = boundary.judge(row, validated=validated)
            if boundary.reporter is not None:
                boundary.reporter.report(row, is_best=is_best, validated=validated)
            if epoch_ended and self._hooks.end_epoch is not None:
                boundary.end_epoch(row)
        if self._counters.stopped:
            boundary.validate_early_end()
        boundary.save(save_due=save_due, validated=validated)
        boundary.end()

    # The hooks.

    def training_step(self, batch: Any) -> Any:
        """Return the loss of one micro-batch: a tensor (a mean), MeanLoss, SumLoss, StepOutput or a dict of losses."""
        if self.loss is None:
            return batches.own_loss(self, batch)
        inputs, target = self._hooks.split(batch)
        output = self.model(*inputs) if type(inputs) is tuple else batches.call(self.model, inputs)
        loss = self._hooks.training_loss(output, target)
        return StepOutput(loss, output, target) if self.metrics or self._hooks.standard_error_of else loss

    def validation_step(self, batch: Any) -> Any:
        """Return the loss of a batch in validation, like `training_step`. Calls `training_step` if overridden."""
        hooks = self._hooks
        if hooks.overrides_training_step or self.loss is None:
            return self.training_step(batch)
        inputs, target = hooks.split(batch)
        output = self.model(*inputs) if type(inputs) is tuple else batches.call(self.model, inputs)
        loss = hooks.evaluated_loss(output, target)
        return StepOutput(loss, output, target) if self.metrics or hooks.standard_error_of else loss

    def predict_step(self, batch: Any) -> Any:
        """Return the output for one batch."""
        inputs, _ = self._hooks.split(batch)
        return batches.call(self.model, inputs)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return (inputs, target). Inputs: a tuple of positional ones, a dict of keywords, or one tensor."""
        return batches.split(batch)

    def count(self, batch: Any) -> Count:
        """Return the count of the loss of a host batch: the divisor of torch's mean, else the rows."""
        known, target = self._hooks.known_loss, batches.known_target(batch)
        return rows_of(batch) if known is None or target is None else known.count(target)

    def to_device(self, batch: Any) -> Any:
        """Return the batch on `self.device`, in the same containers."""
        return move(batch, self.device)

    def begin_epoch(self, epoch: int) -> None:
        """Run before the first window of an epoch (from 0). May change model, groups, frozen parameters and data."""

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Run after an epoch and its validation, with the row of `history`."""

    def after_update(self) -> None:
        """Run after each applied update. The weights are updated; `.grad` is the gradient of the step."""

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of a checkpoint by name. Override it to add objects to `super().parts()`."""
        from trainwright.fit.saving import parts_of

        return parts_of(self._run, self._boundary)

    # Methods for users.

    @suggests
    def evaluate(
        self, data: Any, name: str = "val", *, batch_size: int | None = None, max_batches: int | None = None
    ) -> dict[str, float]:
        """Return exact means over all rows of `data`, without side effects.

        Args:
            data: Data of any form that `fit` takes. A dict of sets returns `<name>_<key>_loss` for each set.
            name: The prefix of the numbers: `val_loss`, `val_accuracy`.
            batch_size: Rows per batch, for arrays and data sets.
            max_batches: Evaluate only this number of first batches of each set. A set that has more gets the number
                `<name>_first_batches`.
        """
        from trainwright.evaluation import passes  # on the first call, so that `import trainwright` stays cheap
        from trainwright.fit import opening

        opened = opening.open_sets(self, data, name, batch_size=batch_size, max_batches=max_batches)
        return passes.evaluate_sets(self, opened) | opening.partial_sets(opened)

    @suggests
    def predict(self, data: Any, *, batch_size: int | None = None, max_batches: int | None = None) -> Any:
        """Return the outputs for all rows of `data`, in order, joined, on the CPU, without side effects.

        Args:
            data: Data of any form that `fit` takes.
            batch_size: Rows per batch, for arrays and data sets.
            max_batches: Predict only this number of first batches.
        """
        from trainwright.evaluation.predictions import predict
        from trainwright.fit import opening

        return predict(self, opening.open_one(self, data, "predict", batch_size=batch_size, max_batches=max_batches))

    @suggests
    def predict_batches(
        self, data: Any, *, batch_size: int | None = None, max_batches: int | None = None
    ) -> Iterator[Any]:
        """Return an iterator over the outputs of `predict`, one per batch, for outputs that do not fit in memory.

        Between two outputs, and after the iterator is dropped, modes, weights, random state, gradients and `state` are
        yours. Each batch runs with the current weights. All ranks iterate together.

        Args:
            data: Data of any form that `fit` takes.
            batch_size: Rows per batch, for arrays and data sets.
            max_batches: Predict only this number of first batches.
        """
        from trainwright.evaluation.predictions import predict_batches
        from trainwright.fit import opening

        source = opening.open_one(self, data, "predict", batch_size=batch_size, max_batches=max_batches)
        return predict_batches(self, source)

    @suggests
    def report(
        self,
        data: Any,
        *,
        kind: ReportKind = "auto",
        names: Sequence[str] | None = None,
        batch_size: int | None = None,
        max_batches: int | None = None,
    ) -> Report:
        """Return a report over all rows of `data`, without side effects.

        Args:
            data: Data of any form that `fit` takes, with targets.
            kind: "classes": scikit-learn's classification report. "values": R2, MAE and RMSE. "auto" chooses by the
                outputs.
            names: Names of the classes, or of the columns.
            batch_size: Rows per batch, for arrays and data sets.
            max_batches: Report on only this number of first batches; the text notes it.
        """
        from trainwright.evaluation.reports import report
        from trainwright.fit import opening

        source = opening.open_one(self, data, "report", batch_size=batch_size, max_batches=max_batches)
        return report(self, source, kind=kind, names=names)

    @suggests
    def plan(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | None = None,
        max_updates: int | None = None,
        max_seconds: float | None = None,
        epoch_updates: int | None = None,
        batch_size: int | None = None,
    ) -> Plan:
        """Return the plan of a `fit` with these arguments, without running it. Raises for contradictory settings.

        Args:
            train: Training data, as for `fit`.
            val: Validation data, as for `fit`.
            epochs: As for `fit`.
            max_updates: As for `fit`.
            max_seconds: As for `fit`.
            epoch_updates: As for `fit`.
            batch_size: As for `fit`.
        """
        from trainwright.fit import opening
        from trainwright.schedules.bound import bind_schedules

        ends = Ends(epochs, max_updates, max_seconds, epoch_updates)
        with rng_preserved():
            source, held_out = opening.open_data(self, train, val, ends=ends, batch_size=batch_size, joins=False)
        planned = make_plan(self, source, held_out, ends=ends)
        bind_schedules(self.schedule, self.optimizers, planned)
        if self.average is not None:
            self.average.bind(nn.Module(), planned)  # checks its arithmetic; no weight is copied
        return planned

    @suggests
    def log(self, name: str, value: float | Tensor, count: Count | None = None) -> None:
        """Log a number from inside a step.

        Args:
            name: Its name in the history, the journal and the loggers.
            value: The number, or a tensor with one element, which is read at the end of the epoch.
            count: The weight of the number in its mean. None: the rows of the batch.
        """
        self._tracker.log(name, value, count)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the steps, for a custom `update`."""
        from trainwright.evaluation import passes

        return passes.autocast(self)

    def print(self, *values: object) -> None:
        """Print a line on rank 0, above the progress bar.

        Args:
            *values: As for the builtin `print`, joined by spaces.
        """
        if self.is_main:
            write_line(" ".join(map(str, values)))

    @suggests
    def save(self) -> None:
        """Request a checkpoint after the current update. For calls during `fit`."""
        self._boundary.request_save()

    @suggests
    def save_weights(self, path: str | Path) -> None:
        """Write the weights of the model to one safetensors file. Call it on all ranks.

        Args:
            path: The file. It is complete or absent, with plain keys.

        Raises:
            CheckpointError: On all ranks, if the file cannot be written.
        """
        from trainwright.fit.result import write_weights

        write_weights(self, path)

    @suggests
    def stop(self, reason: str) -> None:
        """End `fit` after the current update.

        Args:
            reason: The reason, for `Result.stopped`.
        """
        self._run.stop(reason)

    @property
    def optimizer(self) -> Any:
        """The single optimizer; None without one. SettingError if there are several by name."""
        if not self.optimizers or ONLY in self.optimizers:
            return self.optimizers.get(ONLY)
        names = ", ".join(map(repr, self.optimizers))
        fix = f"self.optimizers[{next(iter(self.optimizers))!r}]"
        raise SettingError(f"self.optimizer, and there are several: {names}", fix=fix)

    @property
    def progress(self) -> Progress:
        """A read-only view of the counters: updates, epochs, rows."""
        return Progress(self._counters)

    @property
    def evaluating(self) -> str | None:
        """The name of the set under evaluation, such as "val" or "val_easy"; None outside of evaluations."""
        return self._record.evaluation.name

    @property
    def fast_path(self) -> str:
        """Text on the path of the updates, with the reason."""
        from trainwright.acceleration.switches import fast_path

        return fast_path(self)

    def _repr_html_(self) -> str:
        """Return the settings and the progress as a table, for a notebook."""
        from trainwright.core.figures import html_pairs

        return html_pairs({**settings_of(self), "device": self.device, "updates": self.progress.updates})

    def __dir__(self) -> list[str]:
        """Return the attributes, without names of other libraries that only raise a hint."""
        return [name for name in super().__dir__() if not points_elsewhere(self, name)]

    # For the package `fit`.

    def _bind_run(self, run: Run, boundary: Boundary) -> None:
        """Set the current run and boundary; `NOT_RUNNING` after the run."""
        self._run, self._boundary = run, boundary


point_elsewhere(Trainer)
