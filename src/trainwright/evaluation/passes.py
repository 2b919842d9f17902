"""Evaluation passes over data. They restore model, optimizer, random states and gradients exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any
from warnings import warn

import torch

from trainwright.core.errors import DataError, SettingError, message, user_line
from trainwright.core.rng import rng_preserved, seed
from trainwright.core.trees import copy_tree
from trainwright.data.source import Source
from trainwright.diagnostics.explain import explain
from trainwright.metrics.metric_set import MetricSet
from trainwright.modules import modes
from trainwright.precision.autocast import beside_training
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.losses import CountObserver
from trainwright.update.per_rank_state import complete_batches, position_text, rank0_buffers, shard_batches
from trainwright.update.trainer_like import TrainerLike, free_transfer_memory, networks_of

READ_EVERY = 128
"""Batches between two reads from the device. Costs memory for as many scalars, and avoids a wait per batch."""

_NO_CONTEXT = nullcontext()
_LOSS_OF_ROWS = "loss of each row"
"""The internal metric for the standard error of a loss. Not reported."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of one pass, and the standard errors that early stopping needs."""

    numbers: dict[str, float]
    errors: dict[str, float]


def evaluate_sets(trainer: TrainerLike, sources: Mapping[str, Source]) -> dict[str, float]:
    """Return the numbers of all sets, with names that begin with the prefix of the set."""
    numbers: dict[str, float] = {}
    for name, source in sources.items():
        evaluation = evaluate(trainer, source, name=name)
        numbers |= evaluation.numbers
        trainer._record.evaluation.errors |= evaluation.errors
    return numbers


def evaluate(trainer: TrainerLike, source: Source, *, name: str, batches: int | None = None) -> Evaluation:
    """Run `validation_step` over one pass of `source`; return numbers such as `<name>_loss`.

    `batches`: use only the first ones. Each rank runs its slice of each batch. The numbers are reduced to rank 0 and
    broadcast.
    """
    metrics, prefix, hooks = _metric_set(trainer, complete=batches is None), f"{name}_", trainer._hooks
    tracker = LossTracker(metrics, hooks)
    tracker.must_feed = metrics is not None
    seen = 0
    with side_effect_free(trainer, source, tracker, name=name) as aside:
        step, to_device = _validation_step(trainer, tracker), trainer._hooks.move
        for batch in islice(trainer._record.evaluation.read_batches(_batches(trainer, aside, tracker)), batches):
            tracker.batch = batch
            returned = step(batch if to_device is None else to_device(batch))
            tracker.record(returned)
            seen += 1
            if not seen % READ_EVERY:
                tracker.read()
        tracker.merge(trainer.world)
        numbers = tracker.means(prefix) if trainer.is_main else {}
        if not any(trainer.world.sum_numbers(seen)):
            raise DataError(message(f"the {name} data gave no batch", want="at least one batch", where=False))
        errors = {} if metrics is None or hooks.standard_error_of is None else _take_errors(numbers, metrics, prefix)
        # Inside the peer-watching context: a metric may fail on rank 0.
        return trainer.world.broadcast(Evaluation(numbers, errors))


@contextmanager
def side_effect_free(
    trainer: TrainerLike,
    source: Source,
    tracker: LossTracker | None = None,
    *,
    name: str | None = None,
    shows_gradients: bool = False,
    pauses: bool = False,
) -> Iterator[Source]:
    """Enter eval mode, no_grad, the evaluation weights and a copy of `state`; restore everything at the end.

    Restored are also random states, those of the loader included. Yields the source to read: the position of `source`
    itself does not move. Errors get an explaining note.

    - `tracker`: receives the numbers logged inside; by default a temporary one.
    - `name`: the name of the set, for an evaluation.
    - `shows_gradients`: `.grad` is visible inside.
    - `pauses`: the pass will enter again; transfer memory is not freed.
    """
    roots = networks_of(trainer)
    alone = not trainer._record.is_under_way and not pauses
    try:
        with (
            rng_preserved(source.generators),
            beside_training(trainer.device.type),
            evaluation_weights(trainer),
            modes.untouched(*roots, shows_gradients=shows_gradients),
            modes.evaluating(*roots),
            torch.no_grad(),
            _NO_CONTEXT if trainer.precision is None else trainer.precision.switches(),
            _Instead(trainer, LossTracker(None, trainer._hooks) if tracker is None else tracker, name=name),
            _NO_CONTEXT if trainer.world.size == 1 else _on_all_ranks(trainer),
        ):
            yield source.independent_copy() if source.repeatable else source
    except BaseException as error:
        explain(error, trainer)
        raise
    finally:
        if alone:
            free_transfer_memory(trainer._hooks)


@contextmanager
def probe_context(trainer: TrainerLike, source: Source) -> Iterator[None]:
    """Enter the context of a probe: that of an evaluation, and the autocast of the precision."""
    with side_effect_free(trainer, source, shows_gradients=True), autocast(trainer):
        yield


def evaluation_weights(trainer: TrainerLike) -> AbstractContextManager[None]:
    """Return a context in which the model holds the evaluation weights, such as averaged ones."""
    if trainer._record.outcome.lacks_weights:
        _warn_of_lost_weights()
    return _NO_CONTEXT if trainer._record.weights is None else trainer._record.weights.evaluated()


def _warn_of_lost_weights() -> None:
    line = user_line()  # no stack level: the number of frames in between varies
    warn(
        "the last fit was passed over, and its weights were not kept: the model holds those it was built with "
        f"until the next fit{f' ({line})' if line else ''}",
        stacklevel=2,
    )


class _Instead:  # a class: every evaluation enters it, and a generator is slower
    """Context with the tracker of a pass, a copy of the user's `state`, and the name of a set."""

    __slots__ = ("_name", "_outer", "_tracker", "_trainer")

    def __init__(self, trainer: TrainerLike, tracker: LossTracker, *, name: str | None = None) -> None:
        self._trainer, self._tracker, self._name = trainer, tracker, name

    def __enter__(self) -> None:
        trainer, record = self._trainer, self._trainer._record.evaluation
        self._outer = trainer._tracker, trainer.state, record.name
        trainer._tracker, trainer.state, record.name = self._tracker, copy_tree(trainer.state), self._name

    def __exit__(self, *error: object) -> None:
        trainer = self._trainer
        trainer._tracker, trainer.state, trainer._record.evaluation.name = self._outer


def autocast(trainer: TrainerLike) -> AbstractContextManager[Any]:
    """Return the autocast of the precision, or a null context."""
    context = None if trainer.precision is None else trainer.precision.autocast(trainer.device.type)
    return nullcontext() if context is None else context


def autocast_step(trainer: TrainerLike, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a step that runs under the autocast of the precision.

    Call it inside `side_effect_free`: an autocast context reads at its creation whether its cache is enabled.
    """
    if trainer.precision is None:
        return step
    context = autocast(trainer)

    def under_autocast(batch: Any) -> Any:
        with context:
            return step(batch)

    return under_autocast


def check_repeatable(source: Source) -> None:
    """Raise DataError if `run_training_forwards` cannot iterate the training data again."""
    if not source.repeatable or source.length is None:
        raise SettingError(
            message(
                f"the averaged weights need BatchNorm statistics of their own, and {source.describe()} "
                "cannot be passed over again",
                want="training data with a length, or a model without BatchNorm",
                fix="average=EMA(0.999), which takes the statistics of training",
            )
        )


def run_training_forwards(trainer: TrainerLike, source: Source) -> None:
    """Run the forwards of one training epoch without gradients, for the BatchNorm statistics of averaged weights.

    The pass always uses epoch 0 and fixed seeds, so that the statistics do not depend on the time of the first
    evaluation. With `on_nonfinite="skip"`, batches with non-finite statistics are left out, as in training.
    """
    from trainwright.update.snapshot import Tensors  # rarely needed: imports stay quick

    tracker, aside = LossTracker(None, trainer._hooks), source.independent_copy()
    to_device = trainer._hooks.move
    generators = aside.generators
    statistics = Tensors(modes.running_statistics(trainer.model) if trainer.on_nonfinite == "skip" else [])
    with ExitStack() as stack:
        stack.enter_context(rng_preserved(generators))
        stack.enter_context(beside_training(trainer.device.type))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Instead(trainer, tracker))
        step = autocast_step(trainer, trainer.training_step)
        seed(0, generators)
        for batch in trainer._record.evaluation.read_batches(complete_batches(trainer, aside)):
            tracker.batch = batch
            statistics.capture()
            step(batch if to_device is None else to_device(batch))
            statistics.restore_nonfinite()


@contextmanager
def _on_all_ranks(trainer: TrainerLike) -> Iterator[None]:
    """Watch the peers, and broadcast the buffers of rank 0."""
    with trainer.world.watch(partial(position_text, trainer)), rank0_buffers(trainer):
        yield


def _batches(trainer: TrainerLike, source: Source, tracker: LossTracker) -> Iterator[Any]:
    """Return the batches of a pass; with several ranks the slices of this rank."""
    if trainer.world.size > 1:
        return shard_batches(trainer, source, tracker)
    return chain.from_iterable(map(source.epoch, (0,)))  # opened at the first batch, when signals are handled


def _validation_step(trainer: TrainerLike, tracker: LossTracker) -> Callable[[Any], Any]:
    """Return the step of an evaluation; an observed step if the count of the mean is unknown beforehand."""
    step, hooks, known = autocast_step(trainer, trainer.validation_step), trainer._hooks, trainer._hooks.known_loss
    is_known = known is not None and known.reduction == "mean" and not hooks.overrides_training_step
    if is_known or hooks.overrides_count:
        return step
    return _observed_step(trainer, step, tracker)


def _observed_step(trainer: TrainerLike, step: Callable[[Any], Any], tracker: LossTracker) -> Callable[[Any], Any]:
    """Return a step in which the count of the mean is observed.

    In the default step, only the loss is observed. A custom step, or a model with a loss, may compute the mean
    anywhere: then the complete step is observed, unless the first batch shows no mean.
    """
    hooks = trainer._hooks
    tracker.count_source = observer = CountObserver()
    if not (
        hooks.overrides_validation_step
        or hooks.overrides_training_step
        or trainer.loss is None
        or "validation_step" in vars(trainer)
    ):
        return step

    observed = False

    def observed_step(batch: Any) -> Any:
        nonlocal observed
        if observed and not observer.found:
            tracker.count_source = None
            return step(batch)
        observed = True
        return observer.observe(step, batch)

    return observed_step


def _metric_set(trainer: TrainerLike, *, complete: bool) -> MetricSet | None:
    """Return the metrics of an evaluation, with those for the standard error of early stopping."""
    metrics, spread = dict(trainer.metrics or {}), trainer._hooks.standard_error_of
    if spread == "loss":
        metrics[_LOSS_OF_ROWS] = _loss_of_rows(trainer)
    if not metrics:
        return None
    checked = trainer._record.checked_metrics
    return MetricSet(metrics, complete=complete, spread=spread is not None, checked=checked)


def _loss_of_rows(trainer: TrainerLike) -> Any:
    if trainer._hooks.known_loss is None:
        raise SettingError(
            message(
                'min_delta="1se" on a loss needs one value per row, and this loss is none of torch\'s own',
                fix="monitor a metric that returns one value per row",
            )
        )
    return trainer._hooks.known_loss.each_row


def _take_errors(numbers: dict[str, float], metrics: MetricSet, prefix: str) -> dict[str, float]:
    """Return the standard errors by name; remove the internal metric from the reported numbers."""
    errors = metrics.errors(prefix)
    if prefix + _LOSS_OF_ROWS in numbers:
        del numbers[prefix + _LOSS_OF_ROWS]
        errors[prefix + "loss"] = errors.pop(prefix + _LOSS_OF_ROWS)
    return errors
