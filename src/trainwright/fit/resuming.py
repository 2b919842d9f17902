"""Finds where a run goes on: the checkpoint that is meant, the stage it was saved in, and everything it holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.checkpointing import state
from trainwright.checkpointing.checkpoint import Keeping
from trainwright.checkpointing.load import Loaded, load_weights
from trainwright.checkpointing.weights import load_into
from trainwright.core.checks import FormError, check_form, is_count, is_dict, is_none_or, is_number, is_numbers, is_text
from trainwright.core.errors import CheckpointError, SettingError, message, warn_user
from trainwright.core.progress import Counters
from trainwright.core.records import Best
from trainwright.core.suggestions import did_you_mean
from trainwright.fit.between_updates import Pauses
from trainwright.fit.per_rank_state import own_of, take_own
from trainwright.fit.plan import Resume
from trainwright.fit.run import Run
from trainwright.fit.setup import changed, settings_of
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.named import has_scheduler, unfuse_spoiled
from trainwright.protocols import Tree
from trainwright.update.owner import Owner, listening


class Found:
    """A checkpoint that was read, and what it means for the `fit` in hand; without one there is no path."""

    def __init__(self, loaded: Loaded | None, resume: Resume, *, stage: int) -> None:
        self.path = None if loaded is None else loaded.path
        self.tree: dict[str, Tree] = {} if loaded is None else loaded.tree
        self.manifest: dict[str, Any] = {} if loaded is None else loaded.manifest
        self._takes_data, self._asked = resume.data, resume.where is not None
        self._fresh = tuple(resume.fresh)
        self._passed = {} if loaded is None or not loaded.passed_over else {"passed_over": loaded.passed_over}
        self.passes = False
        """Whether the `fit` in hand was over when it was saved, and a later one under way."""
        self.before: Found | None = None
        """The checkpoint of an earlier `fit`, where there is none of the one in hand."""
        if loaded is None:
            return
        self._progress = cast(Any, self.tree.get("progress"))
        try:
            _check_progress(self._progress, self.manifest)
        except FormError as error:
            what = f"{loaded.path} is damaged: in part 'progress' {error}"
            raise state.DamagedError(what, str(loaded.path), early=True) from error
        self.saved_stage: int = self._progress["counters"]["stage"]
        self.passes = self.saved_stage > stage

    def begin_epochs(self, owner: Owner, run: Run) -> None:
        """Run `begin_epoch` for every epoch that had begun when it was saved; a new run begins its first."""
        counters = owner.counters
        if self.path is None:
            run.begin_epoch(counters.epoch)
            return
        saved = self._ended(counters.stage)["counters"] if self.passes else self._progress["counters"]
        for epoch in range(saved["epoch"] + saved["begun"]):
            counters.epoch = epoch
            run.begin_epoch(epoch)

    def go_on(self, owner: Owner, keeper: Keeping) -> list[str]:
        """Have the checkpoints of earlier stages be known, and removed in their turn, by a stage that starts.

        Returns what the header says where nothing was found to go on from and the model was trained already.
        """
        if self.path is None and self.before is None and self._asked and owner._record.follows_failure:
            found = f"no checkpoint in {keeper.settings.directory}"
            return [f"{found}: it begins with the weights and the optimizer as the fit that failed has left them"]
        if self.before is not None and self.before.path is not None:
            self.before.adopted_by(keeper)
        return []

    def adopted_by(self, keeper: Keeping) -> None:
        """Have the run of this checkpoint go on in the directory of `keeper`."""
        adopt: Any = keeper.adopt
        adopt(self.path, self.manifest, **self._passed)

    def load(self, owner: Owner, pauses: Pauses) -> list[str]:
        """Load it into everything bound; return the lines that the header says about it."""
        assert self.path is not None
        keeper, counters = pauses.keeper, owner.counters
        if "optimizer" not in self._fresh:
            self._check_optimizer(owner)
        if keeper is not None:
            self.adopted_by(keeper)
        given = _settings(owner)
        reports, lines = self._restore(owner, pauses)
        reports += [*unfuse_spoiled(owner), *_unused(owner, given)]
        counters.stopped = pauses.ended() or ("" if pauses.watch is None or counters.pause else pauses.watch.stopped)
        for report in reports if owner.world.is_main and not counters.stopped else ():  # a finished run does not go on
            warn_user(report)  # it shall be heard without a console too
        random, settle = pauses.run.random, getattr(pauses.run.source, "settle", None)
        if counters.stopped and settle is not None:
            settle()  # no epoch will begin and take the state over; a next `fit` reads the same data
        if counters.stopped or not counters.begun or not random.epoch_start or not self._takes_data:
            # begin_epoch, the order, or what follows this `fit`, draws first; or the epoch in hand begins anew
            random.put_back()
        at = counters.earlier_updates + counters.updates
        for observer in listening(owner):
            resume_at = getattr(observer, "resume_at", None)
            if resume_at is not None:
                resume_at(at, counters.skipped, goes_on=not counters.stopped)
        told = changed(self._progress.get("settings", {}), settings_of(owner))
        anew = f"resume_data=False: epoch {counters.earlier_epochs + counters.epoch + 1} begins anew, with other data"
        fresh = f"resume_fresh: {' and '.join(self._fresh)} started anew" if self._fresh else ""
        anew = "" if self._takes_data else anew
        lines = [f"resumed from {self.path} at update {at}", *lines, *reports, fresh, anew, told]
        return [line for line in lines if line]

    def _check_optimizer(self, owner: Owner) -> None:
        """Refuse optimizers of other classes: torch would load their state without a word."""
        now = settings_of(owner)["optimizer"]
        saved = self._progress.get("settings", {}).get("optimizer", now)
        if saved != now:
            line = state.fresh_line([*self._fresh, "optimizer"])
            raise CheckpointError(
                message(
                    f"{self.path} was saved with {saved}; this Trainer has {now}",
                    want="the same optimizer: its state is of no use to another",
                    fix=f"build it as it was; or {line}; or give Checkpoint() a new "
                    f"directory and begin with the weights alone: load_weights({str(self.path)!r}, model)",
                    where=False,
                )
            )

    def _restore(self, owner: Owner, pauses: Pauses) -> tuple[list[str], list[str]]:
        """Give every part its state; return the reports of the parts, and lines for the header alone."""
        source = pauses.run.source
        parts, tree = dict(owner.parts()), dict(self.tree)
        self.tree.clear()
        own, number = own_of(owner, tree)
        for name in () if self._takes_data else ("data", "totals"):
            parts.pop(name, None)
            tree.pop(name, None)
        saved, origin = tree.pop(state.PARAMETERS, None), str(self.path)
        rates = _rates(owner) if "schedule" in self._fresh else []
        self._start_anew(owner, parts, tree)
        state.check(parts, tree, origin=origin, fresh=self._fresh)
        tree, matched = state.in_order(parts, tree, saved, origin=origin)
        if is_sharded(*owner.model.parameters()):
            from trainwright.distributed.resharding import place

            tree = place(tree, parts, likes=pauses.leaving.sharding_of_best(), world=owner.world)
        reports = state.restore(parts, tree, origin=origin)
        for optimizer, before in rates:
            _set_rates(optimizer, before)
        if not self._takes_data:
            owner.counters.batch = 0
        reports += take_own(owner, own, number=number, source=source if self._takes_data else None)
        return reports, matched

    def _start_anew(self, owner: Owner, parts: dict[str, Any], tree: dict[str, Tree]) -> None:
        """Take the parts of `resume_fresh` out of both: they stay as they were built."""
        known = sorted({*SLOTS_WITH_STATE, *parts, *tree} - set(state.NEVER_FRESH))
        for name in self._fresh:
            if name not in known:
                what = f"fit(resume_fresh={self._fresh!r}): there is no part {name!r}.{did_you_mean(name, known)}"
                raise SettingError(message(what, want=f"some of {', '.join(known)}"))
            parts.pop(name, None)
            dropped = tree.pop(name, None)
            if name == "average" and dropped is not None:
                tree["model"] = _trained_weights(owner.model, tree["model"], dropped)

    def pass_stage(self, owner: Owner, pauses: Pauses) -> list[str]:
        """Take the counters and the history that this stage ended with: a later one is loaded by its own `fit`."""
        assert self.path is not None
        if pauses.keeper is not None:
            self.adopted_by(pauses.keeper)
        ended = self._ended(owner.counters.stage)
        self.tree.clear()
        owner.counters.load_state_dict(ended["counters"])
        owner.history[:] = self._progress["history"][: ended["rows"]]
        record = owner._record
        record.ended = ended
        held = pauses.leaving.path_at(ended["left"])
        record.lacks_weights = held is None or not _holds(owner, held)
        if record.lacks_weights:
            record.ended = {**ended, "weights": "as built (those of this stage are gone)"}
        return [f"passed over: {self.path} is of a later fit of this run"]

    @property
    def place(self) -> str:
        """Where it lies, and which stage is over where a later one goes on."""
        assert self.path is not None
        return f"a stage in {self.path.parent}" if self.passes else str(self.path.parent)

    def _ended(self, stage: int) -> dict[str, Any]:
        ended: dict[str, Any] = self._progress["stages"][stage]
        return ended


def _check_progress(progress: Any, manifest: Mapping[str, Any]) -> None:
    """Raise FormError where the counters, history and stages of a checkpoint are not as a run writes them."""
    check_form(progress, counters=is_dict, history=_is_history, stages=lambda stages: isinstance(stages, list))
    check_form(progress, settings=_are_texts)
    optional: dict[str, Any] = {"split_at": None, "final": None, "used_rates": {}}
    check_form(optional | progress, split_at=is_none_or(is_number), final=is_none_or(is_dict), used_rates=_are_rates)
    counters, stages = Counters(), progress["stages"]
    for one in stages:
        check_form(one, counters=is_dict, weights=is_text, rows=is_count, left=is_count, best=is_none_or(is_dict))
        check_form(one, notes=lambda notes: isinstance(notes, list) and all(map(is_text, notes)))
        check_form(one, final=is_none_or(is_dict))
        if one["best"] is not None:
            check_form(one["best"], name=is_text, value=is_number, epoch=is_count, update=is_count)
            if set(one["best"]) != {field.name for field in fields(Best)}:
                raise FormError("'best' of an earlier stage cannot be read")
        counters.load_state_dict(one["counters"])
    counters.load_state_dict(progress["counters"])
    if len(stages) < counters.stage:
        raise FormError(f"{len(stages)} stages are listed, and it is of stage {counters.stage}")
    said = (counters.earlier_updates + counters.updates, counters.earlier_epochs + counters.epoch)
    if said != (manifest["update"], manifest["epoch"]):
        listed = f"update {manifest['update']} of epoch {manifest['epoch']}"
        raise FormError(f"the counters say update {said[0]} of epoch {said[1]}, and the manifest {listed}")


def _are_texts(value: object) -> bool:
    """Whether a value is a dict of texts by name."""
    return isinstance(value, Mapping) and all(map(is_text, (*value, *value.values())))


def _are_rates(value: object) -> bool:
    """Whether a value is a dict of lists of rates."""
    lists = value.values() if isinstance(value, Mapping) else [None]
    return all(isinstance(one, list | tuple) and all(map(is_number, one)) for one in lists)


def _is_history(value: object) -> bool:
    """Whether a value is a list of rows, each with the number of its epoch and of its update."""
    return isinstance(value, list) and all(is_numbers(row) and {"epoch", "update"} <= set(row) for row in value)


def _holds(owner: Owner, path: Path) -> bool:
    """Load the weights of a checkpoint; False where they are of a model that was built otherwise."""
    weights = load_weights(path)
    try:
        load_into(owner.model, weights, source=str(path))
    except CheckpointError:
        return False
    return True


def find(loaded: Loaded | None, resume: Resume, *, stage: int) -> Found:
    """Say what a checkpoint means; nothing where "auto" has found one of an earlier `fit` alone."""
    found = Found(loaded, resume, stage=stage)
    if loaded is None or found.saved_stage >= stage:
        return found
    if resume.where == "auto":
        start = Found(None, resume, stage=stage)
        start.before = found
        found.tree.clear()  # this fit goes on with what is in memory
        return start
    raise SettingError(
        message(
            f"resume={str(resume.where)!r} was saved in fit number {found.saved_stage + 1} of its run, "
            f"this is number {stage + 1}",
            want="a checkpoint of the same fit, or of a later one",
            fix='resume="auto", which starts this fit where there is none of it',
        )
    )


SLOTS_WITH_STATE = ("schedule", "average", "early_stopping", "precision", "checkpoint", "loss", "state", "optimizer")
"""Parts that a run may have: no mistake in `resume_fresh`, though neither the checkpoint nor the Trainer has them."""
_RATES = ("lr", "initial_lr", "momentum", "betas")
"""What a schedule sets in a parameter group."""


def _trained_weights(model: nn.Module, shown: Mapping[str, Any], average: Any) -> dict[str, Any]:
    """The weights that were trained, of a checkpoint whose model holds the averaged ones."""
    if "taken" not in average:
        what = 'resume_fresh=("average",): the optimizer of the checkpoint averages by itself, and is loaded'
        raise SettingError(message(what, fix="build the Trainer as when it was saved"))
    raw = {**(average["raw"] or {}), **average["statistics"]}
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
