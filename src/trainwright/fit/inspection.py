"""What looks into a run at pauses: each says when the loop must pause for it, and no other update has a part in it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.device import widest_float
from trainwright.core.errors import SettingError, message, not_built
from trainwright.core.model_statistics import ModelStatistics, ParameterStatistics
from trainwright.core.suggestions import did_you_mean
from trainwright.modules.dtensors import is_sharded
from trainwright.observers.profiler import Profile
from trainwright.observers.statistics import Statistics
from trainwright.protocols import listeners
from trainwright.update.owner import listening

if TYPE_CHECKING:
    from trainwright.fit.run import Run


class Inspector(Protocol):
    """What pauses call."""

    def pause(self) -> None:
        """A pause begins: all that was under way on the device has come."""

    def tell(self, *, epoch_ended: bool) -> None:
        """The counters are those of this pause."""

    def next_update(self) -> float:
        """The update after which the loop must pause for it."""
        ...

    def go_on(self) -> None:
        """The pause ends."""


def inspectors_of(run: Run) -> list[Inspector]:
    """One for each profile, and for each of the statistics, that observers ask for."""
    made: list[Inspector] = []
    for one in run.owner.observers:
        if isinstance(one, Profile):
            made.append(_Profiling(one, run))
        elif isinstance(one, Statistics):
            made.append(_Measuring(one, run))
    return made


class _Profiling:
    """One profile of a run. Of several processes all pause for it, and the first one records."""

    def __init__(self, asked: Profile, run: Run) -> None:
        self._asked, self._run, self._here = asked, run, run.owner.is_main
        first = run.counters.updates + asked.after
        self._stops = [first - 1, first, first + asked.updates]
        """The updates after which it warms up, begins and ends."""
        before = run.counters.earlier_updates
        if self._here:
            asked.expect(before + first + 1, before=before)

    def pause(self) -> None:
        """End where the last update was made."""
        if len(self._stops) == 1 and self._comes():
            self._stops.clear()
            if self._here:
                counters = self._run.counters
                self._asked.end(counters.earlier_updates + counters.updates)

    def tell(self, *, epoch_ended: bool) -> None:
        """There is nothing to tell in between."""

    def next_update(self) -> float:
        """The next of its stops."""
        return next((stop for stop in self._stops if stop > self._run.counters.updates), inf)

    def go_on(self) -> None:
        """Warm up, or begin, where it is time to."""
        if self._run.counters.stopped:  # at its end, or by a checkpoint of a finished run
            self._stops.clear()
        elif len(self._stops) == 3 and self._comes():
            self._stops.pop(0)
            if self._here:
                self._asked.warm_up(self._run.owner.device)
        elif len(self._stops) == 2 and self._comes():
            self._stops.pop(0)
            if self._here:
                self._asked.begin()

    def _comes(self) -> bool:
        return self._run.counters.updates >= self._stops[0]


class _Measuring:
    """Measures the weights before and after each update whose turn it is; all processes pause, the first measures."""

    def __init__(self, asked: Statistics, run: Run) -> None:
        self._asked, self._run, self._owner = asked, run, run.owner
        self._on_statistics = listeners(listening(run.owner), "on_statistics")
        self._before: list[tuple[str, Tensor, Tensor]] = []
        """Name, parameter and a copy of it, where the update to come is measured."""
        self._check()

    def pause(self) -> None:
        """What counts is what is true when counters are up to date."""

    def tell(self, *, epoch_ended: bool) -> None:
        """Measure, where the update whose weights were kept was made."""
        counters, before = self._run.counters, self._before
        if not before or counters.updates % self._asked.span.n:
            return
        self._before = []
        told = ModelStatistics(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            parameters=_measured(before),
        )
        for notify in self._on_statistics:
            notify(told)

    def next_update(self) -> float:
        """The update before the next turn, then that one."""
        updates, each = self._run.counters.updates, self._asked.span.n
        turn = (updates // each + 1) * each
        return max(turn - 1, updates + 1)

    def go_on(self) -> None:
        """Keep the weights, where the update to come is measured."""
        self._before = []
        if (self._run.counters.updates + 1) % self._asked.span.n == 0 and self._owner.is_main:
            self._before = [(name, one, one.detach().clone()) for name, one in self._chosen()]

    def _chosen(self) -> list[tuple[str, Any]]:
        pattern = self._asked.parameters
        return [(name, one) for name, one in self._owner.model.named_parameters() if fnmatchcase(name, pattern)]

    def _check(self) -> None:
        chosen = self._chosen()
        if is_sharded(*(parameter for _, parameter in chosen)):
            raise not_built("Statistics of a model in shards", "DDP(), or leave it out")
        if not chosen:
            names = [name for name, _ in self._owner.model.named_parameters()]
            pattern = self._asked.parameters
            what = f"Statistics(parameters={pattern!r}) matches none of the model's.{did_you_mean(pattern, names)}"
            raise SettingError(message(what, have=", ".join(names[:8]), fix='Statistics(parameters="*")'))


@torch.no_grad()
def _measured(before: list[tuple[str, Tensor, Tensor]]) -> dict[str, ParameterStatistics]:
    """The statistics of each parameter, with all numbers of the model read at once."""
    numbers: list[Tensor | float] = []
    for _, parameter, kept in before:
        weight = parameter.detach()
        numbers += [*_four(weight), _norm(weight - kept), _norm(kept)]
        numbers += [] if parameter.grad is None else _four(parameter.grad)
    read = iter(host_reads.read(numbers))
    return {name: _statistics(parameter, read) for name, parameter, _ in before}


def _statistics(parameter: Tensor, read: Any) -> ParameterStatistics:
    norm, largest, zeros, bad, moved, was = (next(read) for _ in range(6))
    size = max(1, parameter.numel())
    told: dict[str, Any] = {}
    if parameter.grad is not None:
        grad_norm, grad_max, grad_zeros, grad_bad = (next(read) for _ in range(4))
        told = {"grad_norm": grad_norm, "grad_max": grad_max, "grad_zeros": grad_zeros / size}
        told["grad_nonfinite"] = int(grad_bad)
    return ParameterStatistics(
        elements=parameter.numel(),
        weight_norm=norm,
        weight_max=largest,
        weight_zeros=zeros / size,
        weight_nonfinite=int(bad),
        update_norm=moved,
        before=was,
        **told,
    )


def _four(tensor: Tensor) -> list[Tensor | float]:
    """Norm, largest absolute value, zeros, elements that are not finite; a sparse tensor leaves zeros out."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if not values.numel():
        return [0.0, 0.0, float(tensor.numel()), 0.0]
    zeros = tensor.numel() - torch.count_nonzero(values)
    return [_norm(values), values.abs().amax(), zeros, torch.isfinite(values).logical_not().sum()]


def _norm(tensor: Tensor) -> Tensor:
    magnitude = tensor.abs() if tensor.is_complex() else tensor
    norm: Tensor = torch.linalg.vector_norm(magnitude, dtype=widest_float(tensor.device))
    return norm
