"""The end of a `fit`: the best and final weights of the model, and the Result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.acceleration.switches import acceleration_notes
from trainwright.checkpointing.coordinator import on_rank_zero
from trainwright.checkpointing.format import is_of_run, is_update_name, update_name, update_of
from trainwright.checkpointing.load import find_weights
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.weights import load_into, save_weights
from trainwright.core.checks import local_path
from trainwright.core.errors import CheckpointError, warn_user
from trainwright.core.records import Best, Result
from trainwright.core.trees import parameters_in
from trainwright.evaluation.passes import evaluation_weights
from trainwright.modules.dtensors import is_sharded
from trainwright.update.per_rank_state import position_text
from trainwright.update.trainer_like import TrainerLike

if TYPE_CHECKING:
    from trainwright.fit.boundary import Boundary
    from trainwright.fit.early_stopping import EarlyStopping


def copies_best(early: EarlyStopping, manager: CheckpointManager | None) -> bool:
    """Whether early stopping holds the best weights on the host: no checkpoint ranks by the same number."""
    if not early.restore_best:
        return False
    if manager is None:
        return True
    watched = (manager.settings.best, manager.settings.mode)
    return watched != (early.monitor, early.mode) or bool(early.min_delta)


class FitEnd:
    """Loads the final weights at the end of a `fit`, and builds its Result."""

    def __init__(self, boundary: Boundary) -> None:
        self._run, self._trainer, self._counters = boundary.run, boundary.trainer, boundary.counters
        self._ends, self._manager, self._early_stopper = boundary.ends, boundary.manager, boundary.early_stopper
        self._record, self._outcome, self._val = boundary.record, boundary.record.outcome, boundary.val

    def restore_best(self) -> None:
        """Load the final weights: averaged and/or best, as configured."""
        self._run.weights.install()
        manager, stopper = self._manager, self._early_stopper
        if stopper is not None and stopper.best is not None and stopper.settings.restore_best:
            if stopper.weights is None:
                self._load(stopper.best)
            else:
                own, frozen = self._trainer.model.state_dict(), frozen_names(self._trainer)
                weights = {**{name: own[name] for name in own if name in frozen}, **stopper.weights}
                self._load_into(stopper.best, weights, source="the best weights")
        elif manager is not None and manager.settings.restore_best and manager.best is not None:
            self._load(manager.best)
        self._run.weights.install()  # again: the next stage compares its weights with the loaded best ones

    def _load(self, best: Best) -> None:
        """Load the weights of a best from its checkpoint. Warns, and changes nothing, if there is none."""
        path = path_at(self._manager, best.update)
        if path is None:
            self._warn_of(best, "are in no checkpoint")
            return
        self._load_into(best, find_weights(path)[1], source=str(path))  # raises if the file is damaged

    def _load_into(self, best: Best, weights: Mapping[str, Any], *, source: str) -> None:
        """Load the weights of a best, sharded or complete. Warns, and changes nothing, if they do not fit the model."""
        try:
            load_into(self._trainer.model, weights, source=source)
        except CheckpointError:
            self._warn_of(best, "are those of another model: it has changed since")
            return
        self._outcome.restored = best

    def _warn_of(self, best: Best, why: str) -> None:
        if self._trainer.is_main:  # all ranks have the same result: one warns
            what = f"the weights of the best {best.name} (update {best.update})"
            warn_user(f"{what} {why}; the model has the last ones")

    def make_result(self) -> Result:
        """Return the Result of the run."""
        if self._outcome.earlier is not None:
            return self._earlier_result(self._outcome.earlier)
        best = None if self._manager is None else self._manager.best
        if best is None and self._early_stopper is not None:
            best = self._early_stopper.best
        weights = ", ".join([text for text in (self._run.weights.name, self._restored_text(best)) if text]) or "last"
        notes, final = self._notes(), self._outcome.final_validation
        return self._result(best=best, weights=weights, notes=notes, final_validation=final)

    def _earlier_result(self, ended: Mapping[str, Any]) -> Result:
        """Return the Result of a stage that ended in an earlier session."""
        best = None if ended["best"] is None else Best(**ended["best"])
        best = best and replace(best, path=path_at(self._manager, best.update))
        notes, final = tuple(ended["notes"]), ended["final"]
        return self._result(best=best, weights=ended["weights"], notes=notes, final_validation=final)

    def _result(
        self, *, best: Best | None, weights: str, notes: tuple[str, ...], final_validation: dict[str, float] | None
    ) -> Result:
        """Return a Result with the numbers of the counters."""
        counters = self._counters
        return Result(
            history=list(self._trainer.history),
            updates=counters.updates,
            epochs=counters.epoch,
            stopped=counters.stopped,
            seconds=counters.seconds,
            skipped=counters.skipped,
            blocked=0.0 if self._manager is None else self._manager.blocked,
            best=best,
            weights=weights,
            notes=notes,
            final_validation=final_validation,
        )

    def _restored_text(self, best: Best | None) -> str:
        """Return the best that was loaded, as text; with its name if the `best` of the run is another number."""
        restored = self._outcome.restored
        if restored is None:
            return ""
        by = f" by {restored.name}" if best is not None and best.name != restored.name else ""
        return f"best of epoch {restored.epoch}{by}"

    def _notes(self) -> tuple[str, ...]:
        """Return the notes on partial validation, skipped updates, acceleration, failed saves and a resume."""
        failing = "" if self._manager is None else self._manager.failing
        reported = self._run.strategy.reporter.note
        partial = [f"{name}: {source.limit}" for name, source in self._val.items() if source.limit]
        lines = [*partial, *self._skip_notes(), *acceleration_notes(self._trainer), failing, reported]
        lines += self._resume_notes()
        return tuple(line for line in lines if line)

    def _skip_notes(self) -> tuple[str, ...]:
        counters, total = self._counters, self._run.plan.updates
        planned = [schedule.monitor is None for schedule in self._run.schedules.values()]
        short = total - counters.updates if total is not None and planned and all(planned) else 0
        if counters.skipped and not counters.updates:
            return (f"nothing was trained: all {counters.skipped} updates were skipped",)
        if not counters.skipped or short <= 0 or self._ends.epochs != counters.epoch:
            return ()
        return (f"the schedule ended {short} short of its {total} updates: {counters.skipped} were skipped",)

    def _resume_notes(self) -> tuple[str, ...]:
        """Return the note on where a resume continues, for a run ended by an error or a signal."""
        manager, again = self._manager, 'fit(..., resume="auto")'
        # After an error no rank waits for another, and only rank 0, which writes, knows the complete saves.
        if manager is None or not self._record.failed or not self._trainer.is_main:
            return ()
        reached = self._counters.earlier_updates + self._counters.updates
        named = [path for path in manager.saved if is_update_name(path.name)]
        known = [update_of(path.name) for path in named if is_of_run(path, manager.run_id)]
        if manager.saved and not named:
            return ()  # a custom manager, whose names have no update
        if known and known[0] >= reached:
            return (f"saved at update {known[0]}: {again} continues from there",)
        where = f"not saved at its end: {again} continues from update {known[0]}" if known else ""
        missed = f'; Trainer(on_error="save") would have saved update {reached}' if self._outcome.could_save else ""
        return (f"{where or f'nothing is saved: {again} starts at the beginning'}{missed}",)


def path_at(manager: CheckpointManager | None, update: int) -> Path | None:
    """Return the checkpoint of an update; None if it was removed."""
    if manager is None:
        return None
    complete = [*manager.saved, None if manager.best is None else manager.best.path]
    return next((path for path in complete if path is not None and path.name == update_name(update)), None)


def write_weights(trainer: TrainerLike, path: str | Path) -> None:
    """Write the evaluation weights to one file, on rank 0. Every rank then returns, or raises its error."""
    path = local_path(path, "save_weights({})", file=True)
    with trainer.world.watch(partial(position_text, trainer)), evaluation_weights(trainer):
        weights = full_weights(trainer)
        if trainer.world.size == 1:
            save_weights(path, weights)
        else:
            on_rank_zero(trainer.world, lambda: save_weights(path, weights))


def full_weights(trainer: TrainerLike) -> dict[str, Any]:
    """Return the weights of the model as plain tensors; for a sharded model on rank 0 alone."""
    if not trainer.parallel.shards:
        weights: dict[str, Any] = trainer.model.state_dict()
        return weights
    from trainwright.distributed.fsdp import full_state_dict

    return full_state_dict(trainer.model, trainer.world)


def _layout(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return shape and sharding of each tensor. Tensors of equal layout can be copied in place."""
    return {
        name: (value.shape, is_sharded(value)) if isinstance(value, Tensor) else None
        for name, value in state_dict.items()
    }


def frozen_names(trainer: TrainerLike) -> set[str]:
    """Return the names of parameters that `trainable_only=True` leaves out: frozen, and in no optimizer."""
    if trainer.checkpoint is None or not trainer.checkpoint.trainable_only:
        return set()
    trained = {id(parameter) for parameter in parameters_in(*trainer.optimizers.values())}
    named = trainer.model.named_parameters(remove_duplicate=False)
    return {name for name, one in named if not one.requires_grad and id(one) not in trained}


def copied_weights(model: Any, into: dict[str, Tensor] | None, *, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a host copy of the weights; written into `into`, the last copy, if the layouts are equal."""
    state_dict = {name: value for name, value in model.state_dict().items() if name not in without}
    if into is not None and _layout(into) == _layout(state_dict) and all(isinstance(v, Tensor) for v in into.values()):
        for name, value in state_dict.items():
            into[name].copy_(value)
        return into
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)  # extra state
        for name, value in state_dict.items()
    }
