"""One pass over data without a trace: modes, random state and gradients are afterwards what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.base.contracts import Source
from trainwright.base.errors import DataError, SettingError, message
from trainwright.base.records import Step
from trainwright.data.source import beside
from trainwright.run.failure import explain
from trainwright.run.ledger import Ledger
from trainwright.run.owner import Owner
from trainwright.runtime import modules
from trainwright.runtime.device import move
from trainwright.runtime.randomness import unmoved
from trainwright.runtime.snapshot import snapshot
from trainwright.slots.metrics import Meters
from trainwright.slots.precision import switched

READ_EVERY = 128
"""Batches between two reads of an evaluation's numbers: memory for that many scalars, and no wait per batch."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of one pass, and the standard errors of those that were asked for."""

    numbers: dict[str, float]
    errors: dict[str, float]


@contextmanager
def traceless(owner: Owner, source: Source) -> Iterator[None]:
    """Eval mode, no gradients, the weights that count and a copy of the state inside; all put back afterwards.

    Every random state too, that of the loader included.
    """
    roots = [module for module in (owner.model, owner.loss, *owner.frozen.values()) if isinstance(module, nn.Module)]
    with ExitStack() as stack:
        stack.enter_context(unmoved(getattr(source, "generators", ())))
        stack.enter_context(showing(owner))
        stack.enter_context(modules.evaluating(*roots))
        stack.enter_context(torch.no_grad())
        stack.enter_context(switched(owner.precision))
        stack.enter_context(_state_aside(owner))
        yield


def showing(owner: Owner) -> AbstractContextManager[None]:
    """The weights that count, inside."""
    return nullcontext() if owner.between.shown is None else owner.between.shown.evaluated()


@contextmanager
def _state_aside(owner: Owner) -> Iterator[None]:
    """A copy of the user's state inside."""
    state = owner.state
    owner.state = snapshot(state)
    try:
        yield
    finally:
        owner.state = state


def feed(owner: Owner, source: Source) -> None:
    """Run a pass of the training data through the model as training does, without a gradient or any other trace."""
    if not source.repeatable or source.length is None:
        raise SettingError(
            message(
                f"the averaged weights need BatchNorm statistics of their own, and {source.describe()} "
                "cannot be passed over again",
                want="training data with a length, or a model without BatchNorm",
                fix="average=EMA(0.999), which takes the statistics of training",
            )
        )
    ledger = Ledger(None, owner.hooks)
    outer, owner.ledger = owner.ledger, ledger
    step, move = _with_autocast(owner, owner.training_step), owner.hooks.move
    aside = beside(source)
    try:
        with unmoved(getattr(aside, "generators", ())), torch.no_grad(), _state_aside(owner):
            for batch in aside.epoch(owner.counters.epoch):
                ledger.batch = batch
                step(batch if move is None else move(batch))
    finally:
        owner.ledger = outer


@contextmanager
def probing(owner: Owner, source: Source) -> Iterator[None]:
    """What a probe runs in: as without a trace as an evaluation, under the autocast of the precision."""
    outer, owner.ledger = owner.ledger, Ledger(None, owner.hooks)
    context = None if owner.precision is None else owner.precision.autocast(owner.device.type)
    try:
        with traceless(owner, source), nullcontext() if context is None else context:
            yield
    finally:
        owner.ledger = outer


def evaluate(owner: Owner, source: Source, *, name: str, batches: int | None = None) -> Evaluation:
    """Run `validation_step` over one pass of `source` (at most `batches` of it); numbers are named `<name>_loss` etc.

    The standard error over rows of `hooks.spread` is wanted too.
    """
    meters = _meters(owner, owner.hooks.spread)
    ledger = Ledger(meters, owner.hooks)
    move = owner.hooks.move
    outer, owner.ledger = owner.ledger, ledger
    step = _with_autocast(owner, owner.validation_step)
    seen = 0
    try:
        with traceless(owner, source):
            for batch in source.epoch(0) if batches is None else islice(source.epoch(0), batches):
                ledger.batch = batch
                returned = step(batch if move is None else move(batch))
                if not seen:
                    ledger.check_fed(returned)
                ledger.note(returned)
                seen += 1
                if not seen % READ_EVERY:
                    ledger.close()
                    ledger.close_totals()
            numbers = ledger.means(f"{name}_")
    except BaseException as error:
        explain(error, owner)
        raise
    finally:
        owner.ledger = outer
    if not seen:
        raise DataError(message(f"the {name} data gave no batch", want="at least one batch", where=False))
    return Evaluation(*_without_hidden(numbers, meters, f"{name}_"))


def predict(owner: Owner, source: Source) -> Any:
    """Return the outputs of `predict_step` over one pass in data order, joined on the CPU; see `join`."""
    step = _with_autocast(owner, owner.predict_step)
    outputs: list[Any] = []
    try:
        with traceless(owner, source):
            for batch in source.epoch(0):
                output = step(batch if owner.hooks.move is None else owner.hooks.move(batch))
                outputs.append(move(output.output if type(output) is Step else output, torch.device("cpu")))
    except BaseException as error:
        explain(error, owner)
        raise
    if not outputs:
        raise DataError(message("the data to predict gave no batch", want="at least one batch"))
    return join(outputs)


def join(outputs: list[Any]) -> Any:
    """Concatenate nested outputs along their rows; a list where the shapes do not allow it."""
    first = outputs[0]
    if isinstance(first, Tensor):
        fits = first.ndim > 0 and all(output.shape[1:] == first.shape[1:] for output in outputs)
        return torch.cat(outputs) if fits else outputs
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join(list(column)) for column in zip(*outputs, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(join(list(column)) for column in zip(*outputs, strict=True))
    if isinstance(first, dict):
        return {key: join([output[key] for output in outputs]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: join([getattr(output, n) for output in outputs]) for n in names})
    return outputs


_HIDDEN = "loss of each row"


def _meters(owner: Owner, spread: str | None) -> Meters | None:
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
    return Meters(metrics, spread=spread is not None) if metrics else None


def _without_hidden(
    numbers: dict[str, float], meters: Meters | None, prefix: str
) -> tuple[dict[str, float], dict[str, float]]:
    errors = {} if meters is None else {prefix + name: value for name, value in meters.errors().items()}
    if prefix + _HIDDEN in numbers:
        del numbers[prefix + _HIDDEN]
        errors[prefix + "loss"] = errors.pop(prefix + _HIDDEN)
    return numbers, errors


def _with_autocast(owner: Owner, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    context = None if owner.precision is None else owner.precision.autocast(owner.device.type)
    if context is None:
        return step

    def under_autocast(batch: Any) -> Any:
        with context:
            return step(batch)

    return under_autocast
