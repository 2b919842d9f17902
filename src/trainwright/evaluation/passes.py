"""One pass over data without a trace: modes, random state and gradients are afterwards what they were."""

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
from trainwright.core.process_state import beside_training
from trainwright.core.rng import seed, unmoved
from trainwright.core.trees import copy_tree
from trainwright.data.source import Source
from trainwright.data.sources import beside
from trainwright.diagnostics.explain import explain
from trainwright.metrics.metric_set import MetricSet
from trainwright.modules import modes
from trainwright.update.hooks import let_go_of_memory, mover
from trainwright.update.loss_tracker import Ledger
from trainwright.update.losses import CountObserver
from trainwright.update.owner import Owner, networks_of
from trainwright.update.per_rank_state import complete_batches, position_text, rank0_buffers, shard_batches

READ_EVERY = 128
"""Batches between two reads of an evaluation's numbers: memory for that many scalars, and no wait per batch."""


_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of one pass, and the standard errors of those that were asked for."""

    numbers: dict[str, float]
    errors: dict[str, float]


@contextmanager
def traceless(owner: Owner, source: Source, *, shows_gradients: bool = False) -> Iterator[Source]:
    """Eval mode, no gradients, the weights that count and a copy of the state inside; all put back afterwards.

    Every random state too, that of the loader included. Yields the source to read from, so that the position of the
    one that was given stays where it is. Numbers that are logged inside belong to a ledger that the caller puts in
    the place of training's.
    """
    roots = networks_of(owner)
    alone = not owner._record.is_under_way
    try:
        with (
            unmoved(source.generators),
            beside_training(owner.device.type),
            showing(owner),
            modes.untouched(*roots, shows_gradients=shows_gradients),
            modes.evaluating(*roots),
            torch.no_grad(),
            _NOTHING if owner.precision is None else owner.precision.switches(),
            _state_aside(owner),
            _NOTHING if owner.world.size == 1 else _together(owner),
        ):
            yield beside(source) if source.repeatable else source
    finally:
        if alone:
            let_go_of_memory(owner.hooks)


@contextmanager
def _together(owner: Owner) -> Iterator[None]:
    """Of several processes: watched over, and with the buffers of the first one."""
    with owner.world.watched(partial(position_text, owner)), rank0_buffers(owner):
        yield


def showing(owner: Owner) -> AbstractContextManager[None]:
    """The weights that count, inside."""
    if owner._record.lacks_weights:
        line = user_line()  # how many frames lie between differs: the place is told in words
        warn(
            "the last fit was passed over, and its weights were not kept: the model holds those it was built with "
            f"until the next fit{f' ({line})' if line else ''}",
            stacklevel=2,
        )
    return _NOTHING if owner._record.weights is None else owner._record.weights.evaluated()


class _state_aside:  # a class, as the one below, since every evaluation enters them
    """A copy of the user's state inside."""

    __slots__ = ("_owner", "_state")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._state = self._owner.state
        self._owner.state = copy_tree(self._state)

    def __exit__(self, *error: object) -> None:
        self._owner.state = self._state


def check_passes(source: Source) -> None:
    """Refuse data that `feed` cannot pass over, before the first update."""
    if not source.repeatable or source.length is None:
        raise SettingError(
            message(
                f"the averaged weights need BatchNorm statistics of their own, and {source.describe()} "
                "cannot be passed over again",
                want="training data with a length, or a model without BatchNorm",
                fix="average=EMA(0.999), which takes the statistics of training",
            )
        )


def feed(owner: Owner, source: Source) -> None:
    """Run a pass of the training data through the model as training does, without a gradient or any other trace.

    It is the same pass at any time of a run, of epoch 0 and from the same seeds: when somebody looks at averaged
    weights first must not show in their statistics. With `on_nonfinite="skip"` a batch whose statistics are not finite
    is left out, as training leaves it out.
    """
    from trainwright.update.snapshot import Tensors  # rare: imports must stay quick

    ledger, aside = Ledger(None, owner.hooks), beside(source)
    to_device = mover(owner, aside, trains=True)
    generators = getattr(aside, "generators", ())
    statistics = Tensors(modes.running_statistics(owner.model) if owner.on_nonfinite == "skip" else [])
    with ExitStack() as stack:
        stack.enter_context(ledger_aside(owner, ledger))
        stack.enter_context(unmoved(generators))
        stack.enter_context(beside_training(owner.device.type))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_state_aside(owner))
        step = with_autocast(owner, owner.training_step)
        seed(0, generators)
        for batch in owner._record.read_batches(complete_batches(owner, aside)):
            ledger.batch = batch
            statistics.capture()
            step(batch if to_device is None else to_device(batch))
            statistics.restore_nonfinite()


@contextmanager
def probing(owner: Owner, source: Source) -> Iterator[None]:
    """What a probe runs in: as without a trace as an evaluation, under the autocast of the precision."""
    with ledger_aside(owner), traceless(owner, source, shows_gradients=True), autocast(owner):
        yield


class ledger_aside:
    """Another ledger in the place of training's, whose numbers none from inside shall enter."""

    __slots__ = ("_inner", "_outer", "_owner")

    def __init__(self, owner: Owner, ledger: Ledger | None = None) -> None:
        self._owner, self._inner = owner, Ledger(None, owner.hooks) if ledger is None else ledger

    def __enter__(self) -> None:
        self._outer, self._owner.ledger = self._owner.ledger, self._inner

    def __exit__(self, *error: object) -> None:
        self._owner.ledger = self._outer


def autocast(owner: Owner) -> AbstractContextManager[Any]:
    """What a step of this precision runs in."""
    context = None if owner.precision is None else owner.precision.autocast(owner.device.type)
    return nullcontext() if context is None else context


def evaluate(owner: Owner, source: Source, *, name: str, batches: int | None = None) -> Evaluation:
    """Run `validation_step` over one pass of `source` (at most `batches` of it); numbers are named `<name>_loss` etc.

    The standard error over rows of `hooks.spread` is wanted too.
    """
    metrics = _metric_set(owner, owner.hooks.spread, complete=batches is None)
    ledger = Ledger(metrics, owner.hooks)
    seen = 0
    with ledger_aside(owner, ledger):
        try:
            with traceless(owner, source) as aside:
                step, to_device = _observed(owner, ledger), mover(owner, aside, trains=False)
                for batch in islice(owner._record.read_batches(_passed(owner, aside, ledger)), batches):
                    ledger.batch = batch
                    returned = step(batch if to_device is None else to_device(batch))
                    if not seen:
                        ledger.check_fed(returned)
                    ledger.note(returned)
                    seen += 1
                    if not seen % READ_EVERY:
                        ledger.close()
                ledger.merge(owner.world)
                numbers = ledger.means(f"{name}_") if owner.is_main else {}
                if not any(owner.world.total(seen)):
                    raise DataError(message(f"the {name} data gave no batch", want="at least one batch", where=False))
                found = Evaluation(*_without_hidden(numbers, metrics, f"{name}_"))
                return owner.world.same(found)  # watched over still: the first process may have failed in a metric
        except BaseException as error:
            explain(error, owner)
            raise


def _passed(owner: Owner, source: Source, ledger: Ledger) -> Iterator[Any]:
    """The batches of a pass, or of several processes this one's."""
    if owner.world.size > 1:
        return shard_batches(owner, source, ledger)
    return chain.from_iterable(map(source.epoch, (0,)))  # opened when it is first asked, and watched


def evaluate_sets(owner: Owner, sources: Mapping[str, Source]) -> dict[str, float]:
    """The numbers of every set, under the name of each."""
    numbers: dict[str, float] = {}
    for name, source in sources.items():
        evaluation = evaluate(owner, source, name=name)
        numbers |= evaluation.numbers
        owner._record.errors |= evaluation.errors
    return numbers


_HIDDEN = "loss of each row"


def _metric_set(owner: Owner, spread: str | None, *, complete: bool) -> MetricSet | None:
    metrics = dict(owner.metrics or {})
    if spread == "loss":
        if owner.hooks.known is None:
            raise SettingError(
                message(
                    'min_delta="1se" on a loss needs one value per row, and this loss is none of torch\'s own',
                    fix="monitor a metric that returns one value per row",
                )
            )
        metrics[_HIDDEN] = owner.hooks.known.each_row
    if not metrics:
        return None
    checked = owner._record.checked_metrics
    return MetricSet(metrics, complete=complete, spread=spread is not None, checked=checked)


def _without_hidden(
    numbers: dict[str, float], metrics: MetricSet | None, prefix: str
) -> tuple[dict[str, float], dict[str, float]]:
    errors = {} if metrics is None else {prefix + name: value for name, value in metrics.errors().items()}
    if prefix + _HIDDEN in numbers:
        del numbers[prefix + _HIDDEN]
        errors[prefix + "loss"] = errors.pop(prefix + _HIDDEN)
    return numbers, errors


def _observed(owner: Owner, ledger: Ledger) -> Callable[[Any], Any]:
    """Return the step of an evaluation; where neither a known loss nor `count` gives the count of a mean, observed.

    In the default step the loss alone is observed. A step of the user's own, or a model with a loss of its own, may
    compute the mean anywhere: then all of the step is, unless none was found in its first batch.
    """
    step, hooks = with_autocast(owner, owner.validation_step), owner.hooks
    if hooks.summed is not None or hooks.counts_itself:
        return step
    ledger.count_source = observer = CountObserver()
    if not (hooks.validates_itself or hooks.steps_itself or owner.loss is None or "validation_step" in vars(owner)):
        return step

    observed = False

    def observed_step(batch: Any) -> Any:
        nonlocal observed
        if observed and not observer.found:
            ledger.count_source = None
            return step(batch)
        observed = True
        return observer.observe(step, batch)

    return observed_step


def with_autocast(owner: Owner, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step under the autocast of the precision; made inside `traceless`, whose choice of a cache it takes over."""
    if owner.precision is None:
        return step
    context = autocast(owner)

    def under_autocast(batch: Any) -> Any:
        with context:
            return step(batch)

    return under_autocast
