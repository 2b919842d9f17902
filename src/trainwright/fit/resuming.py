"""Carries out a `ResumePlan`: loads a checkpoint into everything that is bound, or passes over a stage that ended."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.checkpointing import parts as run_parts
from trainwright.checkpointing.load import load_weights
from trainwright.checkpointing.optimizer_state import PARAMETERS, put_in_current_order
from trainwright.checkpointing.weights import load_into
from trainwright.core.errors import CheckpointError, SettingError, warn_user
from trainwright.core.suggestions import did_you_mean
from trainwright.fit.between_updates import BetweenUpdates
from trainwright.fit.result import copied_weights, path_at
from trainwright.fit.resume_plan import ResumePlan
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.named import disable_wrong_kernels, has_scheduler
from trainwright.protocols import Tree
from trainwright.update.owner import Owner, listening
from trainwright.update.per_rank_state import load_rank_state, take_rank_state


def resume(plan: ResumePlan, owner: Owner, between: BetweenUpdates) -> list[str]:
    """Carry out the plan; return the lines that the header says besides those of the plan."""
    retained = plan.checkpoint or plan.earlier
    if between.manager is not None and retained is not None:
        between.manager.adopt(retained)
    if plan.ended is not None:
        _pass_over(plan, owner, between)
        return []
    return [] if plan.checkpoint is None else _load(plan, owner, between)


def _pass_over(plan: ResumePlan, owner: Owner, between: BetweenUpdates) -> None:
    """Take the counters, history and weights that the stage ended with."""
    ended = plan.ended
    assert ended is not None and plan.checkpoint is not None and plan.progress is not None
    plan.checkpoint.tree.clear()
    owner._counters.load_state_dict(ended["counters"])
    owner.history[:] = plan.progress["history"][: ended["rows"]]
    record, path = owner._record, path_at(between.manager, ended["left"])
    record.ended = ended
    record.lacks_weights = path is None or not _load_model(owner, path)
    if record.lacks_weights:
        record.ended = {**ended, "weights": "as built (those of this stage are gone)"}


def _load_model(owner: Owner, path: Path) -> bool:
    """Load the weights of a checkpoint; False where they are of a model that was built otherwise."""
    weights = load_weights(path)
    try:
        load_into(owner.model, weights, source=str(path))
    except CheckpointError:
        return False
    return True


def _load(plan: ResumePlan, owner: Owner, between: BetweenUpdates) -> list[str]:
    """Load the checkpoint into everything bound; return lines for the header."""
    counters, run = owner._counters, between.run
    given = _settings(owner)
    reports, lines = _restore(plan, owner, between)
    reports += [*disable_wrong_kernels(owner.optimizers), *_unused(owner, given)]
    _find_position(between)
    if owner.world.is_main and not counters.stopped:  # a finished run does not continue
        for report in reports:
            warn_user(report)  # it matters without a console too
    if counters.stopped:
        run.source.settle()  # no epoch will begin and take the state over; a next `fit` reads the same data
    if counters.stopped or not counters.begun or not run.random.epoch_start or not plan.with_data:
        # begin_epoch, the order, or what follows this `fit`, draws first; or the epoch in hand begins anew
        run.random.restore()
    at = counters.earlier_updates + counters.updates
    for observer in listening(owner):
        resume_at = getattr(observer, "resume_at", None)
        if resume_at is not None:
            resume_at(at, counters.skipped, goes_on=not counters.stopped)
    return [*lines, *reports]


def _find_position(between: BetweenUpdates) -> None:
    """Find out whether the loaded run has ended, or work between two updates is still due where it was left."""
    run, counters = between.run, between.counters
    stopped_early = "" if between.watch is None else between.watch.stopped
    ended = between.end_reached() or stopped_early
    if counters.pause == "final" and not (run.stop_reason or ended):
        counters.pause = ""  # with a later end the run continues without the validation of the earlier one
    run.pending = counters.pause or ("update" if counters.paused < counters.updates else "")
    counters.stopped = ("" if run.pending else ended) or ("" if counters.pause else stopped_early)
    if not run.pending:  # the pending work makes the row of the update before it
        run.optimizer_steps.clear_used_rates()
    if not counters.stopped:
        between.record.final_validation = None


def _restore(plan: ResumePlan, owner: Owner, between: BetweenUpdates) -> tuple[list[str], list[str]]:
    """Give every part its state; return the reports of the parts, and lines for the header alone."""
    source, loaded = between.run.source, plan.checkpoint
    assert loaded is not None
    parts, tree, origin = dict(owner.parts()), dict(loaded.tree), str(loaded.path)
    loaded.tree.clear()
    own, number = take_rank_state(owner, tree)
    for name in () if plan.with_data else ("data", "totals"):
        parts.pop(name, None)
        tree.pop(name, None)
    saved = tree.pop(PARAMETERS, None)
    rates = _rates(owner) if "schedule" in plan.fresh else []
    _start_anew(plan.fresh, owner, parts=parts, tree=tree)
    run_parts.check(parts, tree, origin=origin, fresh=plan.fresh)
    matched = put_in_current_order(parts, tree, saved, origin=origin)
    if is_sharded(*owner.model.parameters()):
        from trainwright.distributed.resharding import place

        tree = place(tree, parts, likes=_sharding_of_best(between), world=owner.world)
    reports = run_parts.restore(parts, tree, origin=origin)
    for optimizer, before in rates:
        _set_rates(optimizer, before)
    if not plan.with_data:
        owner._counters.batch = 0
    reports += load_rank_state(owner, own, number=number, source=source if plan.with_data else None)
    return reports, matched


def _sharding_of_best(between: BetweenUpdates) -> dict[str, Any]:
    """Return host tensors, by part and key, with the sharding that the weights of a loaded best are to have."""
    if not between.copies_best:
        return {}
    return {"early_stopping": {"weights": copied_weights(between.owner.model, None)}}


def _start_anew(fresh: tuple[str, ...], owner: Owner, *, parts: dict[str, Any], tree: dict[str, Tree]) -> None:
    """Take the parts of `resume_fresh` out of both: they stay as they were built."""
    known = sorted({*SLOTS_WITH_STATE, *parts, *tree} - set(run_parts.NEVER_FRESH))
    for name in fresh:
        if name not in known:
            what = f"fit(resume_fresh={fresh!r}): there is no part {name!r}.{did_you_mean(name, known)}"
            raise SettingError(what, want=f"some of {', '.join(known)}")
        parts.pop(name, None)
        dropped = tree.pop(name, None)
        if name == "average" and dropped is not None:
            tree["model"] = _trained_weights(owner.model, tree["model"], dropped)


SLOTS_WITH_STATE = ("schedule", "average", "early_stopping", "precision", "checkpoint", "loss", "state", "optimizer")
"""Parts that a run may have: no mistake in `resume_fresh`, though neither the checkpoint nor the Trainer has them."""
_RATES = ("lr", "initial_lr", "momentum", "betas")
"""What a schedule sets in a parameter group."""


def _trained_weights(model: nn.Module, shown: Mapping[str, Any], average: Any) -> dict[str, Any]:
    """The weights that were trained, of a checkpoint whose model holds the averaged ones."""
    if "taken" not in average:
        what = 'resume_fresh=("average",): the optimizer of the checkpoint averages by itself, and is loaded'
        raise SettingError(what, fix="build the Trainer as when it was saved")
    raw = {**(average["raw"] or {}), **average.get("statistics", {})}
    first: dict[int, str] = {}
    trained = dict(shown)
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        value = raw.get(first.setdefault(id(tensor), name))  # a tied tensor has its first name alone
        if name in trained and value is not None:
            trained[name] = value
    return trained


def _rates(owner: Owner) -> list[tuple[Optimizer, list[dict[str, Any]]]]:
    """What schedules set, as every group of every optimizer has it now."""
    return [
        (optimizer, [{key: group[key] for key in _RATES if key in group} for group in optimizer.param_groups])
        for optimizer in owner.optimizers.values()
    ]


def _set_rates(optimizer: Optimizer, rates: list[dict[str, Any]]) -> None:
    """Give the groups the rates that they had; a rate in a tensor is filled, since the optimizer may refer to it."""
    for group, before in zip(optimizer.param_groups, rates, strict=True):
        for key, value in before.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _settings(owner: Owner) -> list[dict[str, Any]]:
    """The plain settings of every parameter group, of all optimizers in order."""
    return [
        {"what": f"{name}'s group {index}"}
        | {key: value for key, value in group.items() if isinstance(value, int | float | tuple) and key not in counted}
        for name, optimizer in owner.optimizers.items()
        for counted in [_counted(optimizer)]
        for index, group in enumerate(optimizer.param_groups)
    ]


def _counted(optimizer: Optimizer) -> set[str]:
    """What an optimizer keeps in its groups and nobody has set: its defaults that its call does not take."""
    return set(optimizer.defaults) - set(inspect.signature(type(optimizer)).parameters)


def _has_schedule(owner: Owner) -> bool:
    """Whether rates are set by a schedule, or by a torch scheduler of the user's that is saved beside them."""
    by_hand = any(isinstance(part, LRScheduler) for part in owner.parts().values())
    return owner.schedule is not None or by_hand or any(map(has_scheduler, owner.optimizers.values()))


def _unused(owner: Owner, given: list[dict[str, Any]]) -> list[str]:
    """Name the settings of optimizers that the checkpoint has overruled, but for those that a schedule sets."""
    scheduled = {"what"} | ({"lr", "initial_lr", "momentum", "betas"} if _has_schedule(owner) else set())
    return [
        f"resumed: {key}={loaded.get(key)!r} of the {settings['what']} is the checkpoint's, {mine!r} is not used"
        for settings, loaded in zip(given, _settings(owner), strict=True)
        for key, mine in settings.items()
        if key not in scheduled and loaded.get(key) != mine
    ]
