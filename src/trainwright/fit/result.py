"""The end of a `fit`: the final weights of the model, and the Result."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainwright.acceleration.switches import acceleration_notes
from trainwright.checkpointing.coordinator import on_rank_zero
from trainwright.checkpointing.format import is_of_run, is_update_name, update_name, update_of
from trainwright.checkpointing.load import load_weights
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.weights import load_into, save_weights
from trainwright.core.checks import local_path
from trainwright.core.errors import CheckpointError, warn_user
from trainwright.core.records import Best, Result
from trainwright.evaluation.passes import evaluation_weights
from trainwright.fit.early_stopping import EarlyStopper
from trainwright.fit.plan import Ends
from trainwright.fit.run import Run
from trainwright.modules.dtensors import is_sharded
from trainwright.update.owner import Owner
from trainwright.update.per_rank_state import position_text


class FitEnd:
    """Stores the best weights while a `fit` runs, loads the final ones at its end, and makes its Result."""

    def __init__(self, run: Run, ends: Ends, *, manager: CheckpointManager | None, watch: EarlyStopper | None) -> None:
        self.run, self.owner, self.counters = run, run.owner, run.counters
        self.ends, self.manager, self.watch = ends, manager, watch
        self.record = run.owner._record

    @property
    def restores_from_memory(self) -> bool:
        """Whether early stopping's best weights are kept on the host: no checkpoint watches the same number."""
        early = self.owner.early_stopping
        if early is None or not early.restore_best:
            return False
        settings = None if self.manager is None else self.manager.settings
        watched = (early.monitor, early.mode)
        same = settings is not None and (settings.best, settings.mode) == watched
        return not same or bool(early.min_delta)

    def store_best(self) -> None:
        """Copy the weights as early stopping's best, where no checkpoint has them."""
        watch = self.watch
        assert watch is not None
        with self.run.weights.evaluated():
            watch.weights = _copied(self.owner.model, watch.weights) if self.restores_from_memory else None

    def sharding_of_best(self) -> dict[str, Any]:
        """Return host tensors, by part and key, with the sharding that the weights of a loaded best are to have."""
        if not self.restores_from_memory:
            return {}
        return {"early_stopping": {"weights": _copied(self.owner.model, None)}}

    def restore_best(self) -> None:
        """Load the final weights: averaged and/or best, as configured."""
        self.run.weights.install()
        manager, watch = self.manager, self.watch
        if watch is not None and watch.best is not None and watch.settings.restore_best:
            if watch.weights is None:
                self._load(watch.best)
            else:
                self._load_into(watch.best, watch.weights, source="the best weights")
        elif manager is not None and manager.settings.restore_best and manager.best is not None:
            self._load(manager.best)
        self.run.weights.install()  # once more: the best that was loaded on top is what the next stage finds

    def _load(self, best: Best) -> None:
        """Load the weights of a best from its checkpoint; a warning where that is gone, and the last weights stay."""
        path = self._path_of(best)
        if path is None:
            self._warn_of(best, "were not kept")
            return
        self._load_into(best, load_weights(path), source=str(path))  # raises where the file is damaged

    def _load_into(self, best: Best, weights: Mapping[str, Any], *, source: str) -> None:
        """Load a best's weights, sharded or whole, into the model."""
        try:
            load_into(self.owner.model, weights, source=source)
        except CheckpointError:
            self._warn_of(best, "are those of another model: it has changed since")
            return
        self.record.restored = best

    def _warn_of(self, best: Best, why: str) -> None:
        if self.owner.is_main:  # of several processes all come to the same, and one says it
            what = f"the weights of the best {best.name} (update {best.update})"
            warn_user(f"{what} {why}; the last ones stay")

    def make_result(self) -> Result:
        """Return how the run ended; how the stage had ended, where it was passed over."""
        counters, passed = self.counters, self.record.ended
        best = None if self.manager is None else self.manager.best
        if passed is not None:
            best = None if passed["best"] is None else Best(**passed["best"])
            best = best and replace(best, path=self._path_of(best))
        elif best is None and self.watch is not None:
            best = self.watch.best
        weights = ", ".join([one for one in (self.run.weights.name, self._restored_text(best)) if one]) or "last"
        return Result(
            history=list(self.owner.history),
            best=best,
            updates=counters.updates,
            epochs=counters.epoch,
            stopped=counters.stopped,
            seconds=counters.seconds,
            skipped=counters.skipped,
            weights=weights if passed is None else passed["weights"],
            notes=self._notes() if passed is None else tuple(passed["notes"]),
            blocked=0.0 if self.manager is None else self.manager.blocked,
            final_validation=self.record.final_validation if passed is None else passed["final"],
        )

    def _restored_text(self, best: Best | None) -> str:
        """Return which best the model holds, by name where the run's `best` is of another number."""
        restored = self.record.restored
        if restored is None:
            return ""
        by = f" by {restored.name}" if best is not None and best.name != restored.name else ""
        return f"best of epoch {restored.epoch}{by}"

    def _path_of(self, best: Best) -> Path | None:
        return self.path_at(best.update)

    def path_at(self, update: int) -> Path | None:
        """The checkpoint of an update, where it is still there."""
        manager, name = self.manager, update_name(update)
        kept = [] if manager is None else [*manager.saved, None if manager.best is None else manager.best.path]
        return next((path for path in kept if path is not None and path.name == name), None)

    def _notes(self) -> tuple[str, ...]:
        """Return the lines on what a user should know of the run."""
        lines = (*self._skip_notes(), *acceleration_notes(self.owner), *self._save_notes())
        return (*lines, *self._reporter_notes(), *self._resume_notes())

    def _skip_notes(self) -> tuple[str, ...]:
        counters, total = self.counters, self.run.plan.updates
        rates = self.run.rates
        short = 0 if total is None or rates is None or rates.monitors else total - counters.updates
        if counters.skipped and not counters.updates:
            return (f"nothing was trained: all {counters.skipped} updates were skipped",)
        if not counters.skipped or short <= 0 or self.ends.epochs != counters.epoch:
            return ()
        return (f"the schedule ended {short} short of its {total} updates: {counters.skipped} were skipped",)

    def _save_notes(self) -> tuple[str, ...]:
        """Return the note on a last save that failed."""
        failing = "" if self.manager is None else self.manager.failing
        return (failing,) if failing else ()

    def _reporter_notes(self) -> tuple[str, ...]:
        """Return the note on updates that were reported with the numbers of rank 0 alone."""
        note = self.run.strategy.reporter.note
        return (note,) if note else ()

    def _resume_notes(self) -> tuple[str, ...]:
        """Return the note on where a run that ended in an error, or by a signal, can be resumed."""
        manager, again = self.manager, 'fit(..., resume="auto")'
        # Rank 0 writes: after an error, when nobody waits for anybody, only it knows which saves are complete.
        if manager is None or not self.record.failed or not self.owner.is_main:
            return ()
        reached = self.counters.earlier_updates + self.counters.updates
        named = [path for path in manager.saved if is_update_name(path.name)]
        known = [update_of(path.name) for path in named if is_of_run(path, manager.run_id)]
        if manager.saved and not named:
            return ()  # a manager of the user's own, whose names say nothing
        if known and known[0] >= reached:
            return (f"saved at update {known[0]}: {again} goes on from there",)
        where = f"not saved at its end: {again} goes on from update {known[0]}" if known else ""
        kept = f'; Trainer(on_error="save") would have kept update {reached}' if self.record.could_save else ""
        return (f"{where or f'nothing is saved: {again} begins anew'}{kept}",)


def write_weights(owner: Owner, path: str | Path) -> None:
    """Write the weights that count to one file, on rank 0; return, or raise its error, on every rank afterwards."""
    path = local_path(path, "save_weights({})", file=True)
    with owner.world.watched(partial(position_text, owner)), evaluation_weights(owner):
        weights = whole_weights(owner)
        if owner.world.size == 1:
            save_weights(path, weights)
        else:
            on_rank_zero(owner.world, lambda: save_weights(path, weights))


def whole_weights(owner: Owner) -> dict[str, Any]:
    """The model's weights as plain tensors; those of a model that several processes hold in parts, on the first one."""
    if not owner.parallel.shards:
        weights: dict[str, Any] = owner.model.state_dict()
        return weights
    from trainwright.distributed.gathered_weights import full_state_dict

    return full_state_dict(owner.model, owner.world)


def _layout(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return shape and sharding of each tensor: one of the same layout can be copied in place."""
    return {
        name: (value.shape, is_sharded(value)) if isinstance(value, Tensor) else None
        for name, value in state_dict.items()
    }


def _copied(model: Any, into: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return a host copy of the weights, in the tensors of the last copy where they fit."""
    state_dict = model.state_dict()
    if into is not None and _layout(into) == _layout(state_dict) and all(isinstance(v, Tensor) for v in into.values()):
        for name, value in state_dict.items():
            into[name].copy_(value)
        return into
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)  # extra state
        for name, value in state_dict.items()
    }
