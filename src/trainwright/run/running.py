"""Binds everything one fit needs, yields the run, and undoes all of it at the end."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.base.contracts import Part, Source, listeners
from trainwright.base.errors import SettingError, message
from trainwright.base.plan import Plan
from trainwright.run import state
from trainwright.run.evaluating import evaluate
from trainwright.run.failure import explain
from trainwright.run.owner import Owner
from trainwright.run.pausing import Pauses
from trainwright.run.plan import Ends, check_monitors, make_plan
from trainwright.run.run import Run
from trainwright.runtime.modules import wake
from trainwright.slots.checkpoint import Keeper
from trainwright.slots.precision import switched
from trainwright.slots.saved import encode, find_checkpoint, load_tree


@contextmanager
def running(
    owner: Owner, source: Source, val: Source | None, *, ends: Ends, resume: str | Path | None
) -> Iterator[tuple[Run, Pauses]]:
    """Yield a run that is bound, checked and loaded; afterwards the model holds the weights that `fit` promises.

    Every error of a setting is raised here, before the first update. Observers hear of the end in any case.
    """
    _check_parameters(owner)
    with ExitStack() as undo:
        undo.enter_context(switched(owner.precision))
        plan = make_plan(owner, source, val, ends=ends, notes=_wake(owner))
        run = Run(owner, source, plan)
        keeper, found = _open_directory(owner, resume, undo)
        pauses = Pauses(run, val, ends, keeper=keeper)
        owner.hold(run, pauses)
        undo.callback(owner.let_go)
        _rehearse(owner, run, val)
        if found is not None:
            reports = _load(owner, pauses, found)
            ended = owner.counters.stopped or pauses.end_reached()
            plan = replace(plan, notes=(*plan.notes, *reports), finished=str(found.parent) if ended else "")
        if keeper is not None:
            owner.between.run_id = keeper.run_id
            encode(state.gather(owner.parts()))  # what cannot be saved is refused now, not at the first save
        for notify in listeners(owner.observers, "on_fit_start"):
            notify(plan)
        yield from _until_the_end(owner, run, pauses)


def parts_of(run: Run, pauses: Pauses) -> dict[str, Part]:
    """Return every part of a run that has state, by the names of a checkpoint."""
    owner = run.owner
    named: dict[str, Any] = {
        "model": owner.model,
        "loss": owner.loss if isinstance(owner.loss, nn.Module) and owner.loss.state_dict() else None,
        "optimizer": owner.optimizer,
        "precision": run.scaler,
        "schedule": run.rates,
        "early_stopping": pauses.watch,
        "checkpoint": pauses.keeper,
        "progress": state.Held(
            lambda: {"counters": owner.counters.state_dict(), "history": owner.history},
            lambda tree: _take_progress(owner, tree),
        ),
        "totals": run.ledger,
        "data": run.source,
        "random": run.random,
    }
    return {name: part for name, part in named.items() if part is not None}


def _until_the_end(owner: Owner, run: Run, pauses: Pauses) -> Iterator[tuple[Run, Pauses]]:
    try:
        pauses.start()
        with run.watching_steps():
            yield run, pauses
        pauses.restore_best()
    except BaseException as error:
        explain(error, owner)
        pauses.stop_clock()
        first_line = str(error).partition("\n")[0]
        owner.counters.stopped = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        raise
    finally:
        owner.result = pauses.result()
        for notify in listeners(owner.observers, "on_fit_end"):
            notify(owner.result)


def _wake(owner: Owner) -> tuple[str, ...]:
    switched_on = wake(owner.model)
    if not switched_on:
        return ()
    shown = ", ".join(switched_on[:4]) + (f" and {len(switched_on) - 4} more" if len(switched_on) > 4 else "")
    return (f"switched from eval to train mode: {shown}",)


def _check_parameters(owner: Owner) -> None:
    """Refuse a trainable parameter that no optimizer trains, and an optimizer that trains another model."""
    trained = {id(p) for group in owner.optimizer.param_groups for p in group["params"]}
    roots = {"model": owner.model, "loss": owner.loss}
    trainable = {
        f"{root}.{name}": parameter
        for root, module in roots.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    left_out = [name for name, p in trainable.items() if id(p) not in trained]
    if left_out or not trainable:
        raise _nothing_trains(left_out, len(trainable))


def _nothing_trains(left_out: list[str], trainable: int) -> SettingError:
    if not trainable:
        what, have = "nothing in the model requires a gradient: there is nothing to train", ""
        want, fix = "parameters that are trained", "parameter.requires_grad_(True), or evaluate() alone"
    elif len(left_out) == trainable:
        what, have = "the optimizer trains no parameter of this model", ""
        want = "an optimizer over model.parameters() of the model that is given"
        fix = "build the optimizer from the same model object"
    else:
        what, have = f"{len(left_out)} trainable parameters are in no optimizer", ", ".join(left_out[:5])
        want = "every parameter that requires a gradient in the optimizer"
        fix = "add them to the optimizer, or parameter.requires_grad_(False)"
    return SettingError(message(what, have=have, want=want, fix=fix))


def _open_directory(owner: Owner, resume: str | Path | None, undo: ExitStack) -> tuple[Keeper | None, Path | None]:
    """Bind the checkpoint slot, and find what is to be resumed."""
    settings = owner.checkpoint
    if settings is None:
        if resume == "auto":
            fix = 'Trainer(..., checkpoint=Checkpoint("runs/x"))'
            raise SettingError(message('resume="auto" without a checkpoint directory', fix=fix))
        return None, find_checkpoint(resume, None)
    keeper: Keeper = settings.bind(owner.between.run_id or secrets.token_hex(8))
    undo.callback(keeper.release)
    keeper.prepare(resuming=resume is not None)
    return keeper, find_checkpoint(resume, settings.directory, run=keeper.run_id)


def _rehearse(owner: Owner, run: Run, val: Source | None) -> None:
    """Run one validation batch without a trace, so that what is wrong with it shows before the first update."""
    produced = {"loss", *(owner.metrics or {})}
    owner.ledger.must_feed = val is None and bool(owner.metrics)
    if val is not None and val.repeatable:
        first = evaluate(owner, val, name="val", batches=1)
        produced |= set(first.numbers)
    elif val is not None:
        produced |= {f"val_{name}" for name in produced}
    monitor = None if run.rates is None else run.rates.monitor
    free = (owner.hooks.logs_freely, owner.hooks.evaluates_itself)
    check_monitors(owner, has_val=val is not None, produced=produced, free=free, rates=monitor)


def _load(owner: Owner, pauses: Pauses, found: Path) -> list[str]:
    """Load a checkpoint into everything bound; return the lines that the header says about it."""
    tree, manifest = load_tree(found)
    if tree.get("progress", {}).get("counters", {}).get("stage", 0) != owner.counters.stage:
        raise SettingError(
            message(
                f"{found.name} was saved in another fit of the script than this one",
                want="a checkpoint of the same stage; going on in the second of two fits is not built yet",
                where=False,
            )
        )
    if pauses.keeper is not None:
        pauses.keeper.adopt(found, manifest)
    given = [_settings(group) for group in owner.optimizer.param_groups]
    reports = [*state.restore(owner.parts(), tree, origin=str(found)), *_unused(owner, given)]
    for report in reports:
        warnings.warn(report, stacklevel=5)  # at the line that calls `fit`: it shall be heard without a console too
    counters = owner.counters
    counters.stopped = "" if pauses.watch is None else pauses.watch.stopped
    at = counters.earlier_updates + counters.updates
    for observer in owner.observers:
        resume_at = getattr(observer, "resume_at", None)
        if resume_at is not None:
            resume_at(at)
    return [f"resumed from {found} at update {at}", *reports]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}


def _unused(owner: Owner, given: list[dict[str, Any]]) -> list[str]:
    """Name the settings of the optimizer that the checkpoint has overruled; what a schedule sets is its own affair."""
    scheduled = set() if owner.schedule is None else {"lr", "initial_lr", "momentum", "betas"}
    return [
        f"resumed: {key}={group[key]!r} of the optimizer's group {index} is the checkpoint's, {mine!r} is not used"
        for index, (settings, group) in enumerate(zip(given, owner.optimizer.param_groups, strict=True))
        for key, mine in settings.items()
        if key not in scheduled and group.get(key) != mine
    ]


def _take_progress(owner: Owner, tree: Any) -> None:
    owner.counters.load_state_dict(tree["counters"])
    owner.history[:] = tree["history"]


__all__ = ["Plan", "parts_of", "running"]
