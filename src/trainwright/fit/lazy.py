"""What a Trainer calls of modules that are heavy to import: each is imported when the first of these is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.optim import Optimizer

    from trainwright.core.plan import Plan
    from trainwright.evaluation.reports import Asked, Report
    from trainwright.fit.between_updates import Pauses
    from trainwright.fit.plan import Ends, Resume
    from trainwright.fit.run import Run
    from trainwright.protocols import Schedule, Source, Stateful
    from trainwright.schedules.rates import Rates
    from trainwright.update.owner import Owner


def running(
    owner: Owner, train: Any, val: Any, *, batch_size: int | None, ends: Ends, resume: Resume
) -> AbstractContextManager[tuple[Run, Pauses]]:
    """`run.running.running`: a run that is bound, checked and loaded, and undone at the end."""
    from trainwright.fit.running import running

    return running(owner, train, val, batch_size=batch_size, ends=ends, resume=resume)


def parts_of(run: Run, pauses: Pauses) -> dict[str, Stateful]:
    """`run.running.parts_of`: every part of a run that has state."""
    from trainwright.fit.running import parts_of

    return parts_of(run, pauses)


def bind_rates(schedule: Any, optimizers: Mapping[str, Optimizer], plan: Plan) -> Rates | None:
    """`schedules.rates.bind_rates`: the schedule of a run, or one for each of its optimizers."""
    from trainwright.schedules.rates import bind_rates

    return bind_rates(schedule, optimizers, plan)


def fast_path(owner: Owner) -> str:
    """`run.path.fast_path`: which path the updates take."""
    from trainwright.acceleration.path import fast_path

    return fast_path(owner)


def report(owner: Owner, source: Source, *, kind: Asked, names: Sequence[str] | None) -> Report:
    """`run.report.report`: what a model is worth on data."""
    from trainwright.evaluation.reports import report

    return report(owner, source, kind=kind, names=names)


def save_weights(owner: Owner, path: str | Path) -> None:
    """Write the weights that count to one file, on rank 0; return, or raise its error, on every rank afterwards."""
    from trainwright.checkpointing.load import save_weights
    from trainwright.checkpointing.rank0 import first_of
    from trainwright.core.checks import local_path
    from trainwright.evaluation.passes import showing
    from trainwright.fit.per_rank_state import standing
    from trainwright.fit.setup import whole_weights

    path = local_path(path, "save_weights({})", file=True)
    with owner.world.watched(partial(standing, owner)), showing(owner):
        weights = whole_weights(owner)
        if owner.world.size == 1:
            save_weights(path, weights)
        else:
            first_of(owner.world, lambda: save_weights(path, weights))


def as_schedule(value: object) -> Schedule | None:
    """`schedules.given.as_schedule`: what was given as one, checked."""
    from trainwright.schedules.given import as_schedule

    return as_schedule(value)
