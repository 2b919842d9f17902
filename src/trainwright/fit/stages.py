"""The start of a stage, which is one `fit`, after earlier ones; undone where the `fit` is refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import SettingError, user_line
from trainwright.core.progress import Counters
from trainwright.core.torch_private import versions_preserved
from trainwright.optim.groups import set_option
from trainwright.update.per_rank_state import broadcast_weights
from trainwright.update.trainer_like import TrainerLike, free_transfer_memory


def start_stage(trainer: TrainerLike, undo: ExitStack, *, resumes: bool, epochs: int | None) -> None:
    """Start a stage; where an error comes before its loop, `undo` leaves the trainer as its last `fit` did.

    SettingError where a `fit` of the same trainer is under way.
    """
    last = trainer._record
    if last.is_under_way:
        what, fix = "fit() from within a fit() of the same Trainer", "another Trainer, with a model of its own"
        raise SettingError(what, want="one fit at a time", fix=fix)
    before = TrainedStage(trainer) if last.stages else LastStage(trainer)
    record = trainer._record = last.next_stage()
    undo.push(before.leave)
    trainer._tracker.reset()
    before.begin_next(resumes=resumes)
    if epochs == 1:
        record.notes += _note_a_loop(trainer, last_caller=last.caller)
    if trainer.world.size > 1:
        # After the trained weights are back: averaged ones that were written to are not replaced.
        broadcast_weights(trainer)


def _note_a_loop(trainer: TrainerLike, *, last_caller: str) -> tuple[str, ...]:
    """Return the header's line, once, where `fit(epochs=1)` is called in a loop and a slot starts again each time."""
    record, line = trainer._record, user_line()
    restarted = [name for name in ("schedule", "early_stopping") if getattr(trainer, name) is not None]
    record.caller = last_caller if last_caller == "-" else line
    if last_caller != line or not line or not restarted:
        return ()
    record.caller = "-"
    verb = "starts" if len(restarted) == 1 else "start"
    slots = " and ".join(restarted).replace("_", " ")
    return (f"fit(epochs=1) in a loop ({line}): the {slots} {verb} anew with each fit: write fit(epochs=n)",)


class LastStage:
    """The trainer as it was before this `fit`: its record and its counters."""

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer, self._record, self._counters = trainer, trainer._record, trainer._counters.state_dict()

    def begin_next(self, *, resumes: bool) -> None:
        """Prepare counters, rates and weights for the next stage. No-op: none came before."""

    def leave(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        """End the stage: as an `__exit__`. Restores the trainer where an error came before the loop."""
        trainer = self._trainer
        trainer._record.is_under_way = False
        if error is not None and not trainer._record.has_begun:
            self._restore()
        free_transfer_memory(trainer._hooks)

    def _restore(self) -> None:
        self._trainer._record = self._record
        self._trainer._counters.load_state_dict(self._counters)


class TrainedStage(LastStage):
    """The trainer as its last `fit` left it: also the settings of its parameter groups, and its evaluation weights."""

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__(trainer)
        self._groups = [
            (group, {key: _plain(value) for key, value in group.items() if key != "params"})
            for optimizer in trainer.optimizers.values()
            for group in optimizer.param_groups
        ]
        tensors = [] if self._record.weights is None else [*trainer.model.parameters(), *trainer.model.buffers()]
        self._weights = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def begin_next(self, *, resumes: bool) -> None:
        """Reset the counters, but for the totals; restore the rates from before a schedule and trained weights."""
        _count_anew(self._trainer._counters, continues=self._record.failed and resumes)
        for schedule in self._record.schedules:
            schedule.restore_groups()
        weights = self._record.weights
        if weights is not None and not weights.restore():
            self._weights, self._record.weights = [], None  # they are the user's now
            line = "the weights were changed since the last fit: they are trained, not the ones it averaged"
            self._trainer._record.notes = (line,)

    def _restore(self) -> None:
        super()._restore()
        taken = _UndoneSchedule(self._groups)
        if taken.changed:
            self._record.schedules = (taken,)
        if self._record.weights is not None:
            self._record.weights.install()
            # Their versions are recorded in `weights`.
            with versions_preserved(tensor for tensor, _ in self._weights), torch.no_grad():
                for tensor, value in self._weights:
                    tensor.copy_(value)


def _count_anew(counters: Counters, *, continues: bool) -> None:
    """Start the counters of a stage, but for the totals of earlier ones.

    `continues`: it resumes after a `fit` that failed, and is the same stage once more.
    """
    fresh = Counters(
        stage=counters.stage + (not continues),
        earlier_updates=counters.earlier_updates + (0 if continues else counters.updates),
        earlier_epochs=counters.earlier_epochs + (0 if continues else counters.epoch),
    )
    counters.load_state_dict(fresh.state_dict())


class _UndoneSchedule:
    """Rates that `restore_groups` of a schedule had set, and that a refused fit has undone."""

    def __init__(self, groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self.changed = [
            (group, key, _plain(group[key]), value)
            for group, before in groups
            for key, value in before.items()
            if key in group and _plain(group[key]) != value
        ]
        for group, key, _, value in self.changed:
            set_option(group, key, value)

    def restore_groups(self) -> None:
        """Give them to the groups once more, unless others were set by hand since."""
        for group, key, given, value in self.changed:
            if _plain(group[key]) == value:
                set_option(group, key, given)


def _plain(value: Any) -> Any:
    """Return a setting of a group, a rate in a tensor as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
