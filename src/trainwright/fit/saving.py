"""The checkpoints of a run: when a save is due, the parts that it holds, and its report to observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.parts import gather
from trainwright.checkpointing.weights import PartialWeights, completed, other_frozen, without_frozen
from trainwright.core.device import devices_of, move
from trainwright.core.durations import Trigger
from trainwright.core.errors import CheckpointError
from trainwright.core.records import Saved
from trainwright.core.trees import NamedParts
from trainwright.fit.result import frozen_names
from trainwright.fit.run import Run
from trainwright.optim.named import ONLY
from trainwright.protocols import Stateful, Tree, listeners
from trainwright.update.per_rank_state import PROCESSES, rank_state
from trainwright.update.trainer_like import TrainerLike, active_observers

if TYPE_CHECKING:
    from trainwright.fit.boundary import Boundary


class RunCheckpoints:
    """Passes the state of one `fit` to the checkpoint manager. Built after loading."""

    def __init__(self, run: Run, manager: CheckpointManager) -> None:
        self.run, self.trainer, self.counters, self.manager = run, run.trainer, run.counters, manager
        every = manager.settings.every
        self.triggers = [] if isinstance(every, str) else [Trigger(every, self.counters, of="every")]
        """The trigger of `every`; none for "auto", which saves after each validation."""
        self._saved_at: Any = None
        self._reserves = True
        """Whether memory for a copy of the state is not reserved yet."""
        self._on_save = listeners(active_observers(self.trainer), "on_save")
        manager.on_result = run.wake

    def arrive(self) -> None:
        """Report saves. At the first boundary after an update, when the state has its full size, reserve memory."""
        self.report()
        if self._reserves and self.counters.updates:
            self._reserves = False
            self._reserve()

    def _reserve(self) -> None:
        average = self.run.weights.average
        if average is None or not average.will_need_statistics:  # else the averaged weights need a pass over the data
            with self.run.weights.evaluated():
                self.manager.reserve(gather_state(self.trainer, self.trainer.parts()))

    def is_due(self, *, validated: bool, epoch_ended: bool) -> bool:
        """Whether a save is due. `validated`: a validation has run, or, without `val`, an epoch has ended."""
        fired = [trigger.fires(self.counters, epoch_ended=epoch_ended) for trigger in self.triggers]
        return any(fired) if fired else validated

    def save(self, *, instead: Mapping[str, Tree] | None = None) -> None:
        """Gather the state of all parts and pass it to the manager. `instead`: states that replace those of parts.

        With an average, part `model` holds the evaluation weights and part `average` the trained weights
        (`EvaluationWeights.state_dict`): `load_weights` of a checkpoint returns the validated weights.
        """
        trainer, counters = self.trainer, self.counters
        update = counters.earlier_updates + counters.updates
        measured: dict[str, float] = {}
        for row in trainer.history[-2:]:  # a validation and the epoch's end may have the same update
            measured |= row if row["update"] == update else {}
        self.run.tracker.merge(trainer.world)
        replaced = dict(instead or {})
        if trainer.world.size > 1:  # before the evaluation weights, with other statistics, are in the model
            random = replaced.get("random") or self.run.random.state_dict()
            own = rank_state(trainer, random=random["now"], data=self.run.rollback.data_position())
            replaced[PROCESSES] = trainer.world.all_gather(own)
        with self.run.signals.held(), self.run.weights.evaluated():
            self.manager.save(
                gather_state(trainer, trainer.parts()) | replaced,
                update=update,
                epoch=counters.earlier_epochs + counters.epoch,
                metrics=measured,
            )
        self._saved_at = self._position

    def report(self, *, wait: bool = False) -> None:
        """Report new complete checkpoints to the observers. CheckpointError if a save has failed."""
        with self.run.signals.held():
            saved = self.manager.completed(wait=wait)
        self.notify(saved)

    def notify(self, saved: list[Saved]) -> None:
        """Report complete checkpoints to the observers."""
        for checkpoint in saved:
            for notify in self._on_save:
                notify(checkpoint)

    @property
    def has_current_state(self) -> bool:
        """Whether the state of this boundary was saved already."""
        return bool(self._saved_at == self._position)

    @property
    def _position(self) -> tuple[Any, ...]:
        counters = self.counters
        return (counters.epoch, counters.batch, counters.last_boundary, counters.interrupted_validation)


def gather_state(trainer: TrainerLike, parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of every part for a checkpoint; with `trainable_only=True` without the frozen weights."""
    tree: dict[str, Any] = gather(parts)
    frozen = frozen_names(trainer)
    if frozen:
        tree["model"] = without_frozen(tree["model"], frozen)
        raw = tree["average"].get("raw") if "average" in tree else None
        if raw is not None:
            tree["average"] |= {"raw": {name: value for name, value in raw.items() if name not in frozen}}
    return tree


def complete_state(trainer: TrainerLike, tree: dict[str, Any], *, origin: str) -> None:
    """Add the frozen weights of the model to a state that was saved without them.

    CheckpointError if they differ from those of the run in name, shape, dtype or a sample of elements.
    """
    saved = tree.get("model")
    if not isinstance(saved, PartialWeights):
        return
    tree["model"], differing = completed(saved, trainer.model, source=origin)
    if differing:
        what, fix = other_frozen(differing, source=origin), "load them before Trainer(model, ...), as in the first run"
        raise CheckpointError(what, want="the frozen weights of the run", fix=fix)
    average = tree.get("average")
    if isinstance(average, Mapping) and average.get("raw") is not None:
        named = dict(trainer.model.named_parameters())
        own = {name: named[name].detach() for name in saved.frozen if name in named}
        own = {name: one for name, one in own.items() if one.is_floating_point() or one.is_complex()}  # as averages are
        tree["average"] = {**average, "raw": {**own, **average["raw"]}}


def parts_of(run: Run, boundary: Boundary) -> dict[str, Stateful]:
    """Return every part of a run that has state, by the names of a checkpoint."""
    trainer = run.trainer
    named: dict[str, Any] = {
        "model": trainer.model,
        "loss": trainer.loss if isinstance(trainer.loss, nn.Module) and trainer.loss.state_dict() else None,
        "optimizer": NamedParts(trainer.optimizers) if run.optimizer_steps.named else trainer.optimizers[ONLY],
        "precision": run.scaler,
        "schedule": NamedParts(run.schedules) if isinstance(trainer.schedule, Mapping) else run.schedules.get(ONLY),
        "average": run.weights if run.weights.differs else None,
        "early_stopping": boundary.early_stopper,
        "checkpoint": boundary.manager,
        "progress": RunProgress(run),
        "totals": run.tracker,
        "data": DataPosition(run),
        "state": _TrainerStatePart(trainer),
        "random": run.random,
    }
    return {name: part for name, part in named.items() if part is not None}


class DataPosition:
    """Part `data`: the position of this rank in the training data, after the batches trained on."""

    def __init__(self, run: Run, *, other_size: bool = False) -> None:
        self._run, self._other_size = run, other_size

    def state_dict(self) -> Tree:
        """Return the position."""
        return self._run.rollback.data_position()

    def load_state_dict(self, tree: Tree) -> str | None:
        """Seek the position in the data; after an ended run, for the next `fit` of the same data."""
        ended = self._run.counters.stopped != ""
        return self._run.source.seek(tree, other_size=self._other_size, ended=ended)


class RunProgress:
    """Part `progress`: counters, history, finished stages, settings as text, and lengths of epochs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        run, trainer = self._run, self._run.trainer
        record = trainer._record
        splits = record.path.splits
        return {
            "counters": trainer._counters.state_dict(),
            "history": trainer.history,
            "final": record.outcome.final_validation,
            "asked": run.stop_reason,
            "stages": record.stages,
            "settings": run.settings,
            "split_at": None if splits is None else splits.limit,  # a resumed run splits from the start
            "used_lrs": run.optimizer_steps.used_lrs(),
            "epochs": run.lengths.state_dict(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Take over the saved progress."""
        run, trainer = self._run, self._run.trainer
        record = trainer._record
        run.optimizer_steps.load_used_lrs(tree["used_lrs"])
        epochs, counters = tree["epochs"], tree["counters"]
        if sum(number for number, *_ in epochs) > counters["earlier_epochs"] + counters["epoch"] + 1:
            raise RuntimeError("'epochs' lists more epochs than were counted")  # before a list of that length is built
        run.lengths.load_state_dict(epochs)
        if record.path.splits is not None:
            record.path.splits.limit = tree["split_at"]
        trainer._counters.load_state_dict(counters)
        trainer.history[:] = tree["history"]
        record.stages = list(tree["stages"])
        # A reason given to `stop()` counts only while its validation and its save are still due.
        due = trainer._counters.interrupted_validation or trainer._counters.last_boundary < trainer._counters.updates
        record.outcome.final_validation, run.stop_reason = tree["final"], tree["asked"] if due else ""


class _TrainerStatePart:
    """Part `state`: the dict `trainer.state` of the user."""

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The dict itself."""
        return self._trainer.state

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Fill the dict. Tensors move to the device of the run, unless the model is on several devices."""
        trainer = self._trainer
        trainer.state.clear()
        if tree:
            trainer.state.update(tree if len(devices_of(trainer.model)) > 1 else move(tree, trainer.device))
