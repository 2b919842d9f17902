"""The loop: fit, update, compute_gradients, apply_gradients, and the hooks that a subclass may override."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from trainwright.fit.plan import EACH_EPOCH, Ends, Resume, make_plan
from trainwright.fit.record import NOT_RUNNING, StageRecord
from trainwright.metrics.metric_set import MetricSet
from trainwright.observers.console import Console, console_observers
from trainwright.observers.live import write_line
from trainwright.optim.clip import as_clip
from trainwright.optim.named import ONLY, by_name, check_schedulers, make_optimizers
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
    from trainwright.evaluation.reports import Asked, Report
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
METHODS = ("fit", "minimize", "autocast", "predict", "report", "plan", "save", "save_weights", "stop", "log", "print")


class Trainer(Generic[M]):
    """Trains a model: composes precision, accumulation, clipping, a schedule, early stopping and checkpoints.

    `model`: any module; it is moved to `device`. `optimizer`: an Optimizer, a function `model -> Optimizer`, a torch
    class or a partial of one, or a dict of these; None for a trainer that only evaluates and predicts. `loss`:
    `loss(output, target)`; None where steps are overridden or the model returns its own. `metrics`: by name, functions
    of (output, target), objects with update, compute and reset, or `Derived`. `precision`: None, "bf16", "fp16",
    "tf32", "auto" or `MixedPrecision`. `accumulate`: micro-batches per update, or `{first epoch: micro-batches}`.
    `clip`: a norm, `ClipNorm`, `ClipValue` or a function of the parameters; with several optimizers it and `schedule`
    are dicts by their names. `average`: `EMA(...)` or `SWA(...)`. `frozen`: modules by name that are not trained.
    `on_nonfinite`: "raise", "skip" or "ignore" an update whose loss or gradient is not finite. `on_error="save"`: save
    the last complete update where your code raises; `on_oom="split"`: smaller micro-batches where memory runs out.
    `parallel`: "auto" takes the processes that there are, `DDP(...)` and `FSDP(...)` say how; None: one. `device`:
    "auto": the model's or the best. `console`: or False. `fast`: `Fast()`. SettingError for what cannot work together.
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
        self.early_stopping = arguments.checked_slot("early_stopping", early_stopping, 'EarlyStopping("val_loss")')
        self.checkpoint = arguments.checked_slot("checkpoint", checkpoint, 'Checkpoint("runs/1")')
        self.average = arguments.checked_slot("average", average, "EMA(0.999)")
        self.on_nonfinite: Policy = as_policy(on_nonfinite)
        self.on_error = arguments.checked_on_error(on_error, checkpoint)
        self.on_oom = arguments.checked_on_oom(on_oom, self.world)
        self.observers: Sequence[Observer] = (*console_observers(console), *arguments.checked_observers(observers))
        self._hooks = arguments.bound_hooks(self, overridden(type(self), Trainer, HOOKS))
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

    # The loop. An update is these four methods, read downwards.

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
        resume: str | Path | None = None,
        resume_data: bool = True,
        resume_fresh: Sequence[str] = (),
    ) -> Result:
        """Train until one of the ends is reached or something asks to stop; return how it went.

        `train`, `val`: `batches(...)`, a DataLoader, a Dataset, array or tuple of arrays (then with `batch_size`),
        an iterable of batches, or a function of the epoch. At least one of `epochs`, `max_updates`, `max_seconds`
        ends it; `epoch_updates` cuts an endless stream into epochs. `validate` says when `val` is evaluated, besides
        at the end. `resume`: "auto" continues from the newest checkpoint, a path from that one; `resume_data=False`:
        with other data; `resume_fresh=("schedule", "average")` starts the named parts anew. A signal ends it after the
        current update and a save: KeyboardInterrupt, or Stopped.
        """
        # Imported at its first call, as the rest of a run's machinery: `import trainwright` stays cheap.
        from trainwright.fit.context import FitContext

        ends = Ends(epochs, max_updates, max_seconds, epoch_updates, validate)
        resuming = Resume(resume, resume_data, resume_fresh)
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
        """Make one optimizer update of one window of micro-batches; return the loss, a dict of numbers, or None."""
        loss = self.compute_gradients(window)
        self.apply_gradients()
        return loss

    def compute_gradients(self, window: Window) -> Tensor:
        """Zero the gradients, run every micro-batch forward and backward with its weight; return the window's loss."""
        run, strategy, tracker = self._run, self._run.strategy, self._tracker
        run.gradients.zero()
        if window.begun:
            tracker.start_extra_pass()
        window.begun = True
        for batch in window:
            with run.autocast:
                returned = strategy.step(batch)  # training_step; of several ranks under DDP
            losses, grad_tensors = strategy.backward_args(returned)  # a grad_tensor is the weight of its loss
            torch.autograd.backward(losses, grad_tensors)
        tracker.recording = True
        # The gradients of a single micro-batch are complete: its mean had no weight.
        complete = window.is_single and run.scaler is None
        loss: Tensor = tracker.window_loss if complete else strategy.finish_backward(window)
        return loss

    def apply_gradients(self, name: str | None = None, closure: Callable[[], Any] | None = None) -> bool:
        """Unscale the gradients and flag NaN or inf in one pass, measure and clip, check, step.

        `strategy.check` decides by the flag, the loss and the norms. Returns whether the update was applied; under a
        deferred check True, and the kernels leave the step out by the flag.

        `name` chooses one of several optimizers. `closure` is for optimizers that evaluate the loss themselves, as
        LBFGS does: `apply_gradients(closure=lambda: self.compute_gradients(window))`.
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
        """Zero the gradients of one optimizer, run `loss` backward and apply: what an `update` of GANs does twice.

        `loss` is whatever a step may return; a tensor counts the window's rows. Returns whether it was applied.
        """
        run = self._run
        run.strategy.status.minimizing = manual_optimization.backward_of(run, loss, name)
        return self.apply_gradients(name)

    def _between_updates(self, boundary: Boundary, *, epoch_ended: bool = False) -> None:
        """Do what is due between two updates: probe, validate, judge, report, save."""
        boundary.begin(epoch_ended=epoch_ended)
        validated = boundary.validation_is_due()
        best = save_due = False
        if validated or epoch_ended or boundary.ends_inside_epoch:
            row = boundary.add_row(boundary.validate(self.evaluate) if validated else None)
            best, save_due = boundary.judge(row, validated=validated)
            if boundary.reporter is not None:
                boundary.reporter.report(row, best=best, validated=validated)
            if epoch_ended and self._hooks.end_epoch is not None:
                boundary.end_epoch(row)
        if self._counters.stopped:
            boundary.validate_early_end(self.evaluate)
        boundary.save(save_due=save_due, validated=validated)
        boundary.end()

    # The hooks.

    def training_step(self, batch: Any) -> Any:
        """Return the loss of one micro-batch: a tensor (a mean), MeanLoss, SumLoss, StepOutput, or a dict of losses."""
        if self.loss is None:
            return batches.own_loss(self, batch)
        inputs, target = self._hooks.split(batch)
        output = self.model(*inputs) if type(inputs) is tuple else batches.call(self.model, inputs)
        loss = self._hooks.training_loss(output, target)
        return StepOutput(loss, output, target) if self.metrics else loss

    def validation_step(self, batch: Any) -> Any:
        """Return the loss of a batch in validation, like `training_step`, which it calls where that is overridden."""
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
        """Return (inputs, target): a tuple of positional inputs, a dict of keywords, or one tensor; None: no target."""
        return batches.split(batch)

    def count(self, batch: Any) -> Count:
        """Return the count of the loss of this host batch: the divisor of torch's mean, else its rows."""
        known, target = self._hooks.known_loss, batches.known_target(batch)
        return rows_of(batch) if known is None or target is None else known.count(target)

    def to_device(self, batch: Any) -> Any:
        """Return the batch on `self.device`, with all its types kept."""
        return move(batch, self.device)

    def begin_epoch(self, epoch: int) -> None:
        """Run before the first window of an epoch (from 0); may change model, groups, trained parameters, and data."""

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Run after an epoch and its validation, with the row that `history` gets."""

    def after_update(self) -> None:
        """Run after each applied update: the weights are the new ones, `.grad` is the gradient of the step."""

    def parts(self) -> dict[str, Stateful]:
        """Return everything that belongs in a checkpoint, by name; add your own objects to `super().parts()`."""
        from trainwright.fit.saving import parts_of

        return parts_of(self._run, self._boundary)

    # Methods for users.

    @suggests
    def evaluate(self, data: Any, name: str = "val", *, batch_size: int | None = None) -> dict[str, float]:
        """Return exact means over all rows of `data` as `<name>_loss` and so on; leaves no trace.

        A dict of several sets gives `<name>_<key>_loss` for each.
        """
        from trainwright.evaluation import passes  # at its first call: `import trainwright` stays cheap
        from trainwright.fit import opening

        return passes.evaluate_sets(self, opening.open_sets(self, data, name, batch_size=batch_size))

    @suggests
    def predict(self, data: Any, *, batch_size: int | None = None) -> Any:
        """Return the outputs for all rows of `data`, in order, joined, on the CPU; leaves no trace."""
        from trainwright.evaluation.predictions import predict
        from trainwright.fit import opening

        return predict(self, opening.open_one(self, data, "predict", batch_size=batch_size))

    @suggests
    def report(
        self, data: Any, *, kind: Asked = "auto", names: Sequence[str] | None = None, batch_size: int | None = None
    ) -> Report:
        """Return scikit-learn's report on classes ("classes"), or R2, MAE and RMSE ("values"), over all rows."""
        from trainwright.evaluation.reports import report
        from trainwright.fit import opening

        return report(self, opening.open_one(self, data, "report", batch_size=batch_size), kind=kind, names=names)

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
        """Return the arithmetic of such a `fit`, without doing any of it; contradictions in it are raised."""
        from trainwright.fit import opening
        from trainwright.schedules.bound import bind_schedules

        ends = Ends(epochs, max_updates, max_seconds, epoch_updates)
        with rng_preserved():
            source, held_out = opening.open_data(self, train, val, ends=ends, batch_size=batch_size, joins=False)
        planned = make_plan(self, source, held_out, ends=ends)
        bind_schedules(self.schedule, self.optimizers, planned)
        if self.average is not None:
            self.average.bind(nn.Module(), planned)  # its arithmetic alone: no weight is copied
        return planned

    def log(self, name: str, value: float | Tensor, count: Count | None = None) -> None:
        """Report a number from inside a step; its mean is weighted by `count`, by default the batch's."""
        self._tracker.log(name, value, count)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes as steps do, for an `update` of your own."""
        from trainwright.evaluation import passes

        return passes.autocast(self)

    def print(self, *values: object) -> None:
        """Print a line, on the main process only, without tearing the live bar."""
        if self.is_main:
            write_line(" ".join(map(str, values)))

    @suggests
    def save(self) -> None:
        """Write a checkpoint after the current update; during `fit` only."""
        self._boundary.request_save()

    @suggests
    def save_weights(self, path: str | Path) -> None:
        """Write the model's weights to one safetensors file: CPU tensors, plain keys. For all ranks, which wait for it.

        CheckpointError on all of them where it cannot be written.
        """
        from trainwright.fit.result import write_weights

        write_weights(self, path)

    @suggests
    def stop(self, reason: str) -> None:
        """End `fit` after the current update; `reason` becomes `Result.stopped`."""
        self._run.stop(reason)

    @property
    def optimizer(self) -> Any:
        """The optimizer, where there is only one without a name; None where there is none."""
        if not self.optimizers or ONLY in self.optimizers:
            return self.optimizers.get(ONLY)
        names = ", ".join(map(repr, self.optimizers))
        fix = f"self.optimizers[{next(iter(self.optimizers))!r}]"
        raise SettingError(f"self.optimizer, and there are several: {names}", fix=fix)

    @property
    def progress(self) -> Progress:
        """The progress of the run: updates, epochs, rows; read-only."""
        return Progress(self._counters)

    @property
    def fast_path(self) -> str:
        """Which path the updates take, and why."""
        from trainwright.acceleration.switches import fast_path

        return fast_path(self)

    def __dir__(self) -> list[str]:
        """The names that there are, without those of other libraries that only raise."""
        return [name for name in super().__dir__() if not points_elsewhere(self, name)]

    # For the package `fit`.

    def _bind_run(self, run: Run, boundary: Boundary) -> None:
        """Refer to the run while it lasts; to `NOT_RUNNING` when it is over."""
        self._run, self._boundary = run, boundary


point_elsewhere(Trainer)
