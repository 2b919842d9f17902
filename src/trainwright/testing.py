"""Checks of custom implementations of the five protocols, for use in unit tests.

Each check uses the object as a run does, on the CPU and within a second. It raises ProtocolError for the first rule of
the protocol that the object breaks, with what it did, what a run needs, and a fix.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.tree import flatten, loads
from trainwright.core.checks import name_of
from trainwright.core.durations import Updates
from trainwright.core.errors import CheckpointError, TrainwrightError, first_line
from trainwright.core.plan import Plan
from trainwright.core.rng import random_state, rng_preserved, seed
from trainwright.core.trees import copy_tree, leaves_of, map_tree
from trainwright.data.opening import batches
from trainwright.metrics.metric_set import MetricSet, check_metrics
from trainwright.observers.probes import Statistics
from trainwright.observers.throughput import Throughput
from trainwright.protocols import Clip, Metric, Observer, Schedule, Stateful, Tree
from trainwright.schedules.bound import BoundSchedule
from trainwright.trainer import Trainer


class ProtocolError(TrainwrightError, AssertionError):
    """An object breaks a rule of the protocol that it implements."""


# Clip


def check_clip(clip: Clip) -> None:
    """Check an object for `Trainer(clip=...)`.

    The rules: it accepts a list of parameters, some of them without a gradient. It changes the gradients only, in
    place, and does not increase their total norm. It returns None, or the norm before clipping as a 0-dim tensor. It
    keeps a NaN in the gradients, for the check for non-finite values. It reads no value from the device.

    Args:
        clip: The object.

    Raises:
        ProtocolError: If a rule is broken, with the rule.
    """
    name = name_of(clip)
    if not callable(clip) or isinstance(clip, type):
        raise ProtocolError(f"{name} is no clip", want="an object that is called with a list of parameters")
    _check_clip_without_values(copy.deepcopy(clip), name)
    large, small = _clipped(clip, name, scale=1e3), _clipped(clip, name, scale=1e-3)
    # Any norm before clipping is proportional to the gradients; a norm after clipping is not.
    if large is not None and small is not None and not math.isclose(large, small * 1e6, rel_tol=1e-2):
        raise ProtocolError(
            f"{name} returns another number than the norm before clipping",
            have=f"{small:g}, and {large:g} for gradients that are a million times as large",
            want="a number that is proportional to the gradients",
            fix="measure the norm first, then scale the gradients",
        )
    parameters = _parameters_with_gradients(1.0)
    gradient = _gradient(parameters[0])
    gradient[0, 0] = math.nan
    clip(parameters)
    if all(bool(_gradient(one).isfinite().all()) for one in parameters if one.grad is not None):
        raise ProtocolError(
            f"{name} hides a NaN: the gradients are finite after it",
            want="a NaN left as it is, for on_nonfinite= decides what follows",
            fix="leave nan_to_num and masks of isfinite out of the clip",
        )


def _check_clip_without_values(clip: Clip, name: str) -> None:
    """Run a clip on tensors on the meta device, where a read of a value is an error."""
    try:
        clip(_parameters_with_gradients(1.0, device="meta"))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, AttributeError) or "NoneType" in str(error):
            raise _no_gradient(name, error) from error
        raise ProtocolError(
            f"{name} reads a value of a tensor, for which each update would wait for the device",
            have=f"{first_line(error, 120)}  (on the meta device, whose tensors have no values)",
            want="arithmetic on tensors, without item(), float() and if on a value",
            fix="gradient.mul_((limit / norm).clamp(max=1.0))",
        ) from error


def _clipped(clip: Clip, name: str, *, scale: float) -> float | None:
    """Clip gradients of a scale, check the changes, and return the norm that the clip returned."""
    parameters = _parameters_with_gradients(scale)
    values = [parameter.detach().clone() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    before = _total_norm(parameters)
    try:
        norm = clip(parameters)
    except (AttributeError, TypeError) as error:
        raise _no_gradient(name, error) from error
    for parameter, value in zip(parameters, values, strict=True):
        if not torch.equal(parameter, value):
            raise ProtocolError(f"{name} changes a parameter", want="changes of the gradients alone")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not gradient:
            raise ProtocolError(
                f"{name} sets another tensor as .grad of a parameter",
                want="the gradient itself, changed in place",
                fix="parameter.grad.mul_(factor)",
            )
    if not _total_norm(parameters) <= before * (1 + 1e-5):
        raise ProtocolError(
            f"{name} raises the norm of the gradients",
            have=f"{_total_norm(parameters):g} after, {before:g} before",
            want="no larger norm: a clip limits",
            fix="clamp the factor: (limit / norm).clamp(max=1.0)",
        )
    if norm is not None and not (isinstance(norm, Tensor) and norm.ndim == 0):
        form = f"a tensor of shape {tuple(norm.shape)}" if isinstance(norm, Tensor) else repr(norm)
        raise ProtocolError(
            f"{name} returns {form}",
            want="the total norm before clipping, a tensor without dimensions, or None",
            fix="return norm, without .item()",
        )
    return None if norm is None else float(norm)


def _parameters_with_gradients(scale: float, device: str = "cpu") -> list[Tensor]:
    """Return three parameters; the last one has no gradient."""
    draws = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = []
    for shape in ((4, 3), (4,), (2, 2)):
        drawn = torch.randn(shape, generator=draws), torch.randn(shape, generator=draws) * scale
        parameter = nn.Parameter(drawn[0].to(device))
        parameter.grad = drawn[1].to(device) if shape != (2, 2) else None
        parameters.append(parameter)
    return parameters


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _total_norm(parameters: list[Tensor]) -> float:
    return math.sqrt(sum(float(one.grad.double().square().sum()) for one in parameters if one.grad is not None))


def _no_gradient(name: str, error: Exception) -> ProtocolError:
    return ProtocolError(
        f"{name} fails on a parameter without a gradient",
        have=first_line(error, 120),
        want="parameters whose .grad is None passed over: a layer may take no part in a loss",
        fix="for parameter in parameters: if parameter.grad is None: continue",
    )


# Schedule


def check_schedule(schedule: Schedule, *, updates: int = 24, epoch_updates: int = 6, lr: float = 0.1) -> None:
    """Check an object for `Trainer(schedule=...)`, in a run with SGD and momentum.

    The rules: `bind` returns a `BoundSchedule` and does not change the settings, so that each `fit` starts equally.
    Rates are finite, not negative, and functions of the applied updates: a second `apply` for the same update sets the
    same rate. A run that is resumed at any update has the rates of an uninterrupted run. `restore_groups` restores the
    rates from before the schedule, for the next `fit`. During the check, a monitored number improves and worsens.

    Args:
        schedule: The object.
        updates: The number of updates of the run.
        epoch_updates: The number of updates per epoch.
        lr: The learning rate of SGD.

    Raises:
        ProtocolError: If a rule is broken, with the rule.
    """
    name = name_of(schedule)
    if not callable(getattr(schedule, "bind", None)) or isinstance(schedule, type):
        raise ProtocolError(
            f"{name} is no schedule",
            want="an object with bind(optimizer, plan)",
            fix="a function (update, total) -> factor is given to Trainer as it is, and needs no check",
        )
    plan = Plan(max_updates=updates, epoch_updates=epoch_updates)
    run = _ScheduledRun(schedule, plan, lr)
    rates = run.rates_until(updates)
    run.bound.restore_groups()
    if run.rate() != lr:
        raise ProtocolError(
            f"restore_groups of {name_of(run.bound)} does not restore the rate",
            have=f"{run.rate():g}",
            want=f"{lr:g}, as before the schedule, for the next fit",
            fix='def restore_groups(self): for each group, set group["lr"] to the value that it had in bind',
        )
    if (other := _ScheduledRun(schedule, plan, lr).rates_until(updates)) != rates:
        raise ProtocolError(
            f"{name} gives other rates when it is bound again",
            have=_first_difference(other, rates),
            want="settings that bind does not change: state belongs in the object that it returns",
        )
    for cut in range(1, updates):
        _check_resumed_rates(schedule, plan, lr, cut=cut, rates=rates)


class _ScheduledRun:
    """A schedule with an optimizer, driven as in a run with a validation after each epoch."""

    def __init__(self, schedule: Schedule, plan: Plan, lr: float) -> None:
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
        self.plan, self.updates = plan, 0
        bound = schedule.bind(self.optimizer, plan)
        if not isinstance(bound, BoundSchedule):
            raise ProtocolError(
                f"{name_of(schedule)}.bind(optimizer, plan) returns {name_of(bound)}",
                want="an object of a subclass of trainwright.schedules.BoundSchedule",
                fix="class MySchedule(BoundSchedule), with apply(self, updates)",
            )
        self.bound = bound

    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def rates_until(self, end: int) -> list[float]:
        """Return the rates of the updates from the current one to `end`, exclusive."""
        rates = []
        while self.updates < end:
            self.bound.apply(self.updates)
            rates.append(self.rate())
            self.bound.apply(self.updates)  # as after a skipped update
            if self.rate() != rates[-1]:
                raise ProtocolError(
                    f"apply({self.updates}) of {name_of(self.bound)} called twice sets two rates",
                    have=f"{rates[-1]:g}, then {self.rate():g}",
                    want="one rate: a skipped update is repeated, and the clock counts applied ones",
                    fix="compute the rate from `updates`, and count nothing in apply",
                )
            if not (math.isfinite(rates[-1]) and rates[-1] >= 0):
                raise ProtocolError(
                    f"apply({self.updates}) of {name_of(self.bound)} sets the rate {rates[-1]!r}",
                    want="a finite number, 0 or above",
                )
            self.updates += 1
            if not self.updates % (self.plan.epoch_updates or 1):
                self._end_epoch()
        return rates

    def _end_epoch(self) -> None:
        if self.bound.monitor is not None:
            epoch = self.updates // (self.plan.epoch_updates or 1)
            self.bound.observe({self.bound.monitor: (1.0, 0.5, 0.75, 0.25)[epoch % 4]})
        self.bound.epoch_ended()


def _check_resumed_rates(schedule: Schedule, plan: Plan, lr: float, *, cut: int, rates: list[float]) -> None:
    killed = _ScheduledRun(schedule, plan, lr)
    killed.rates_until(cut)
    state = _saved_and_loaded(killed.bound, f"the state of {name_of(killed.bound)}")
    resumed = _ScheduledRun(schedule, plan, lr)
    resumed.optimizer.load_state_dict(killed.optimizer.state_dict())  # its groups have the rate of the last update
    resumed.bound.load_state_dict(state)
    resumed.updates = cut
    if (found := resumed.rates_until(len(rates))) != rates[cut:]:
        raise ProtocolError(
            f"{name_of(schedule)} gives other rates when the run is resumed at update {cut}",
            have=_first_difference(found, rates[cut:], begin=cut),
            want="the rates of a run that was never stopped",
            fix=f"state_dict() and load_state_dict(tree) of {name_of(killed.bound)}, with all that apply reads; "
            "groups read from the optimizer in apply, for a resume replaces them",
        )


def _first_difference(found: list[float], wanted: list[float], begin: int = 0) -> str:
    at = next(index for index, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
    return f"{found[at]:g} instead of {wanted[at]:g} at update {begin + at}"


# Metric


def check_metric(metric: Metric | Callable[..., Any], output: Any, target: Any, *, rtol: float = 1e-5) -> None:
    """Check an object or function for `Trainer(metrics=...)`, on a batch of outputs and targets.

    The rules: the result is a number or a dict of numbers. Output and target are not changed. The result for all rows
    does not depend on the division into batches. `compute` changes nothing. `reset` removes all rows. A copy is
    independent, and a copy that is saved inside a pass and loaded continues with the same results. `merge`, if present,
    gives the result for all rows.

    Args:
        metric: The object or function.
        output: Outputs of a model.
        target: Their targets.
        rtol: The relative tolerance between divisions into batches.

    Raises:
        ProtocolError: If a rule is broken, with the rule.
    """
    name = name_of(metric)
    _refuse_non_metrics(metric, name)
    rows = len(next(iter(_leaves(target)), ()))
    if rows < 4:
        raise ProtocolError(f"a target of {rows} rows cannot be cut into batches", want="4 rows or more")
    numbers = _PassNumbers(metric, (output, target), rtol)
    given = copy_tree((output, target))
    of_all = numbers.of((0, rows))
    if _differs((output, target), given):
        raise ProtocolError(
            f"{name} changes the output or the target", want="tensors that are only read: others read them too"
        )
    for cut in (1, rows // 3, rows - 1):
        numbers.expect(
            numbers.of((0, cut), (cut, rows)),
            of_all,
            want="the number of all rows, however they are cut into batches",
            fix="sum numerators and counts in update, and divide in compute; in a function return one value per row, "
            "MeanLoss(value, count) or over_all(fn)",
            when=f"for batches of {cut} and {rows - cut} rows",
        )
    _check_used_metric(numbers, of_all, rows)
    _check_saved_metric(numbers, of_all, rows)
    if callable(getattr(metric, "merge", None)):
        for spans in (((0, rows // 3), (rows // 3, rows)), ((rows // 3, rows), (0, rows // 3))):
            one, other = map(numbers.started, spans)
            one.merge(other.state_dict())
            numbers.expect(
                one.compute(),
                of_all,
                want="a merge that adds all that the other was updated with",
                fix="def merge(self, other): add every attribute that update changes",
                when="merged from two ranks",
            )


def _refuse_non_metrics(metric: Any, name: str) -> None:
    missing = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
    if 0 < len(missing) < 3 and not isinstance(metric, type):
        raise ProtocolError(
            f"{name} has no method {missing[0]}",
            want="update(output, target), compute() and reset()",
            fix=f"def {missing[0]}(self{', output, target' if missing[0] == 'update' else ''}): ...",
        )
    try:
        check_metrics({"metric": metric})
    except TrainwrightError as error:
        raise ProtocolError(
            f"{name} is no metric",
            have=first_line(error),
            want="an object with update, compute and reset, or a function of (output, target)",
        ) from error


class _PassNumbers:
    """Computes the results of passes over slices of one batch."""

    def __init__(self, metric: Any, batch: tuple[Any, Any], rtol: float) -> None:
        self.metric, self._batch, self._rtol = metric, batch, rtol

    def rows(self, begin: int, end: int) -> tuple[Any, Any, int]:
        """Return output, target and number of some rows: the arguments of `MetricSet.update`."""
        output, target = self._batch
        return _cut(output, begin, end), _cut(target, begin, end), end - begin

    def started(self, *spans: tuple[int, int]) -> MetricSet:
        """Return a pass over these rows, with one batch per span."""
        one = MetricSet({"metric": self.metric})
        for span in spans:
            one.update(*self.rows(*span))
        return one

    def of(self, *spans: tuple[int, int]) -> dict[str, float]:
        """Return the results of a pass over these rows, with one batch per span."""
        try:
            return self.started(*spans).compute()
        except TrainwrightError as error:
            raise ProtocolError(
                f"{name_of(self.metric)} gives no number",
                have=first_line(error),
                want="one number, a tensor of one element, or a dict of these",
            ) from error

    def expect(
        self, found: Mapping[str, float], wanted: Mapping[str, float], *, when: str, want: str, fix: str
    ) -> None:
        """Raise ProtocolError if results differ."""
        for key in {**wanted, **found}:
            pair = found.get(key, math.nan), wanted.get(key, math.nan)
            if not math.isclose(*pair, rel_tol=self._rtol, abs_tol=1e-12) and not all(map(math.isnan, pair)):
                at = key.removeprefix("metric").removeprefix("_")
                raise ProtocolError(
                    f"{name_of(self.metric)} gives another number {when}",
                    have=f"{pair[0]:g} instead of {pair[1]:g}{f' for {at!r}' if at else ''}",
                    want=want,
                    fix=fix or None,
                )


def _check_used_metric(numbers: _PassNumbers, of_all: dict[str, float], rows: int) -> None:
    """Check that `compute` changes nothing, and that `reset` removes all rows."""
    used = numbers.started((0, 1))
    used.compute()
    used.update(*numbers.rows(1, rows))
    numbers.expect(
        used.compute(), of_all, want="a compute that changes nothing", fix="", when="where compute ran between batches"
    )
    for begin, end in ((0, rows // 2), (rows // 2, rows)):
        used.reset()
        used.update(*numbers.rows(begin, end))
        numbers.expect(
            used.compute(),
            numbers.of((begin, end)),
            want="a reset that leaves no row behind",
            fix="def reset(self): set every attribute that update changes",
            when="after reset",
        )


def _check_saved_metric(numbers: _PassNumbers, of_all: dict[str, float], rows: int) -> None:
    name = name_of(numbers.metric)
    begun = numbers.started((0, rows // 2))
    try:
        state = _saved_and_loaded(begun, f"the state of {name}")
        resumed = numbers.started()
        resumed.load_state_dict(state)
        resumed.update(*numbers.rows(rows // 2, rows))
        found = resumed.compute()
    except ProtocolError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        found, have = {}, first_line(error)
        raise ProtocolError(
            f"{name} cannot continue from a saved state",
            have=have,
            want="load_state_dict(tree) of what state_dict() gave",
        ) from error
    numbers.expect(
        found,
        of_all,
        want="a saved pass that ends as one that was never stopped",
        fix="return all that update changes from state_dict(), and load it",
        when="where it was saved between batches",
    )
    begun.update(*numbers.rows(rows // 2, rows))
    numbers.expect(
        begun.compute(),
        of_all,
        want="a copy that shares nothing with the one that was saved",
        fix="attributes of the object, set in __init__, and none of the class",
        when="where a copy of it was updated",
    )


def _leaves(value: Any) -> list[Any]:
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor | np.ndarray)]


def _cut(value: Any, begin: int, end: int) -> Any:
    """Return rows of the tensors and arrays of a nested value."""
    has_rows = (Tensor, np.ndarray)
    return map_tree(lambda leaf: leaf[begin:end] if isinstance(leaf, has_rows) and leaf.ndim else leaf, value)


# Stateful


def check_stateful(part: Stateful, change: Callable[[], Any]) -> None:
    """Check an object for `Trainer.parts()`. The check changes the object.

    The rules: its state can be stored. `state_dict()` changes nothing, and includes what a run changes.
    `load_state_dict` restores an earlier state, and the same change then leads to the same state as before.

    Args:
        part: The object.
        change: A function that changes the object as a run does, such as by one update.

    Raises:
        ProtocolError: If a rule is broken, with the rule.
    """
    name = name_of(part)
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(part, method, None)) or isinstance(part, type):
            raise ProtocolError(f"{name} has no method {method}", want="state_dict() and load_state_dict(tree)")
    before = _saved_and_loaded(part, f"the state of {name}")
    if at := _differs(_saved_and_loaded(part, f"the state of {name}"), before):
        raise ProtocolError(f"state_dict() of {name} changes the state at {at}", want="a call that only reads")
    with rng_preserved():
        change()
    changed = _saved_and_loaded(part, f"the state of {name}")
    if not _differs(changed, before):
        raise ProtocolError(
            f"state_dict() of {name} is the same after the change",
            want="all that a run changes: parts left out begin anew in a resume",
            fix="return the changed attributes from state_dict(), and set them in load_state_dict(tree)",
        )
    _load(part, before, name)
    if at := _differs(_saved_and_loaded(part, f"the state of {name}"), before):
        raise ProtocolError(
            f"load_state_dict of {name} does not restore the state at {at}",
            want="the state that state_dict() returned",
            fix="set everything that state_dict() returns",
        )
    with rng_preserved():
        change()
    if at := _differs(_saved_and_loaded(part, f"the state of {name}"), changed):
        raise ProtocolError(
            f"the same change leads {name} to another state after a load, at {at}",
            want="a resumed run that ends as one that was never stopped",
            fix="return everything from state_dict() that the change reads",
        )


def _load(part: Stateful, tree: Tree, name: str) -> None:
    try:
        part.load_state_dict(tree)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ProtocolError(
            f"load_state_dict of {name} fails on what state_dict() returned",
            have=first_line(error),
            want="the same form: a checkpoint gives back dicts, lists, tuples, numbers, strings and tensors",
        ) from error


# Observer


def check_observer(observer: Observer) -> None:
    """Check an object for `Trainer(observers=[...])`, in a short run on the CPU with validations and saves.

    The rules: it is an `Observer`, and each of its methods accepts the records of a run. The run ends with the same
    weights, losses and random state as a run without it.

    Args:
        observer: The object.

    Raises:
        ProtocolError: If a rule is broken, with the rule.
    """
    name = name_of(observer)
    if not isinstance(observer, Observer):
        raise ProtocolError(
            f"{name} is no observer",
            want="an object of a subclass of trainwright.Observer",
            fix="class MyObserver(Observer), with any of its methods on_...",
        )
    with rng_preserved():
        alone, watched = _trained(), _trained(observer)
    if at := _differs(watched, alone):
        is_drawn = at.startswith("random")
        raise ProtocolError(
            f"a run with {name} ends with another {at}",
            want="weights, losses and random state of a run without it: an observer only watches",
            fix="random.Random(0) or torch.Generator() of the observer's own for what it draws"
            if is_drawn
            else "a hook for what changes a run: after_update, end_epoch",
        )


def _trained(*observers: Observer) -> Tree:
    """Train a small model; return weights, losses and random state."""
    seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    rows = torch.randn(24, 3), torch.randn(24, 1)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.MSELoss(),
            checkpoint=Checkpoint(directory),
            observers=[*observers, Throughput(every=Updates(2)), Statistics(every=Updates(2))],
            console=False,
        )
        result = trainer.fit(batches(rows, 4, shuffle=True, seed=0), batches(rows, 8), epochs=2)
    losses = [[row["loss"], row["val_loss"]] for row in result.history]
    return {"weights": model.state_dict(), "losses": losses, "random state": random_state()}


# Common


def _saved_and_loaded(part: Stateful, what: str) -> Tree:
    """Return a copy of the state of an object after a save and a load."""
    try:
        jsonable, tensors = flatten(part.state_dict())
    except CheckpointError as error:
        text, _, rest = str(error).partition("\n")
        raise ProtocolError(
            f"{what} cannot be stored",
            have=text,
            want="None, numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of these",
            fix=rest.partition("fix")[2].strip() or "return plain data from state_dict()",
        ) from error
    return loads(json.dumps(jsonable), {name: tensor.detach().clone() for name, tensor in tensors.items()})


def _differs(one: Tree, other: Tree, at: str = "") -> str:
    """Return the path at which two trees differ, such as `momentum[0]`; "" if they are bitwise equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and list(one) == list(other):
        pairs = [(one[key], other[key], f"{at}[{key!r}]" if at else str(key)) for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = [(one[index], other[index], f"{at}[{index}]") for index in range(len(one))]
    else:
        return "" if _are_equal(one, other) else at or "the top"
    return next(filter(None, (_differs(*pair) for pair in pairs)), "")


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=one.is_floating_point())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    are_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
    return are_nan or bool(one == other)
