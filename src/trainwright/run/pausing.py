"""What happens between two updates when something falls due: validate, judge, stop, tell, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import warn

from torch import Tensor

from trainwright.base.contracts import Source, listeners
from trainwright.base.errors import CheckpointError, SettingError, message
from trainwright.base.records import Best, Result, Validation
from trainwright.base.spans import Span
from trainwright.observers.probe import Probe
from trainwright.run import state
from trainwright.run.due import Bell
from trainwright.run.evaluating import probing
from trainwright.run.plan import Ends
from trainwright.run.run import Run
from trainwright.runtime.storage import is_name, update_name, update_of
from trainwright.runtime.weights import load_into
from trainwright.slots.checkpoint import Keeping
from trainwright.slots.saved import load_weights


class Pauses:
    """The steps of a pause, each of them one line of the trainer's `_pause`."""

    def __init__(self, run: Run, val: Mapping[str, Source], ends: Ends, *, keeper: Keeping | None) -> None:
        self.run, self.val, self.ends = run, val, ends
        self.owner, self.counters, self.history = run.owner, run.counters, run.owner.history
        early = run.owner.early_stopping
        self.watch: Any = None if early is None else early.bind()
        self.keeper = keeper
        self.wants_save = False
        """Whether `save()` was called: a checkpoint is written at the coming boundary."""
        self.restored: Best | None = None
        """The best whose weights the model was left with."""
        self.left: int | None = None
        """The update whose weights the model holds at the end, where a best was put back."""
        self.passed: dict[str, Any] | None = None
        """How this stage ended, where a checkpoint of a later one says that it has."""
        self._before, self._started = self.counters.seconds, time.perf_counter()

    def start(self) -> None:
        """Set clocks and bells going, after loading."""
        counters, keeper = self.counters, self.keeper
        self._before, self._started = counters.seconds, time.perf_counter()
        self._last_time, self._last_rows = self._started, counters.rows
        self._validates = Bell(self.ends.validate, counters, of="validate")
        every: Span | str = "auto" if keeper is None else keeper.settings.every
        self._saves = None if isinstance(every, str) else Bell(every, counters, of="every")
        observers = self.owner.observers
        self._probes = [(one, Bell(one.span, counters, of="every")) for one in observers if isinstance(one, Probe)]
        self._on_validate, self._on_epoch = listeners(observers, "on_validate"), listeners(observers, "on_epoch")
        self._on_save = listeners(observers, "on_save")
        self._updates_before = counters.updates - (1 if counters.batch else 0)
        if not counters.stopped:
            counters.stopped = self.end_reached()
        self.run.due = self.next_due()

    def arrive(self, *, epoch_ended: bool) -> None:
        """Bring the counters up to date, and find out whether an end is reached."""
        counters = self.counters
        self.stop_clock()
        if epoch_ended:
            self.run.check_epoch(self._updates_before)
            counters.epoch, counters.batch, self._updates_before = counters.epoch + 1, 0, counters.updates
            if self.run.rates is not None:
                self.run.rates.epoch_ended()
            if self.run.shown.average is not None:
                self.run.shown.average.epoch_ended(counters.updates, counters.epoch)
        counters.stopped = counters.stopped or self.end_reached()

    def probe(self, trainer: Any, *, epoch_ended: bool) -> None:
        """Call the probes whose turn it is, and take down the numbers that they return."""
        for probe, bell in self._probes:
            if bell.rings(self.counters, epoch_ended=epoch_ended):
                with probing(self.owner, self.run.source):
                    numbers = probe.fn(trainer)
                self.run.ledger.note_probed(numbers, probe.name)

    def validate(self, evaluate: Callable[..., dict[str, float]]) -> dict[str, float]:
        """The numbers of every set of validation data."""
        self.owner.between.errors = {}
        numbers: dict[str, float] = {}
        for name, source in self.val.items():
            numbers |= evaluate(source, name=name)
        return numbers

    def validation_is_due(self, *, epoch_ended: bool) -> bool:
        """Whether to validate now: the span has passed, or the run ends; never twice at one update."""
        rings = self._validates.rings(self.counters, epoch_ended=epoch_ended)
        fresh = self.counters.validated != self.counters.updates
        return bool(self.val) and fresh and (rings or bool(self.counters.stopped))

    @property
    def ends_unfinished(self) -> bool:
        """Whether the run ends inside an epoch whose numbers no row has told yet."""
        update = self.counters.earlier_updates + self.counters.updates
        told = bool(self.history) and self.history[-1]["update"] == update
        return bool(self.counters.stopped) and self.counters.batch > 0 and not told

    def row(self, numbers: Mapping[str, float] | None, *, epoch_ended: bool) -> dict[str, float]:
        """Make the row of the history: the epoch's training numbers so far, and the validation's."""
        counters, ledger = self.counters, self.run.ledger
        row = {
            "epoch": counters.earlier_epochs + counters.epoch,
            "update": counters.earlier_updates + counters.updates,
            **(ledger.means() or self._told()),
            **(numbers or {}),
            **(self.run.steppers.numbers() or {"lr": self.run.steppers.rates[0]}),
        }
        if epoch_ended:
            ledger.reset()
        if numbers is not None:
            counters.validated = counters.updates
        self.history.append(row)
        return row

    def _told(self) -> dict[str, float]:
        """The training numbers that were told last, for a run that is stopped between two epochs."""
        last = self.history[-1] if self.history else {}
        return {
            name: value
            for name, value in last.items()
            if name not in ("epoch", "update") and not name.startswith("val_")
        }

    def judge(self, row: Mapping[str, float], *, validated: bool) -> tuple[bool, bool]:
        """Show the row to early stopping, the checkpoint and the schedule; return whether it is the best, and kept."""
        where = {"epoch": int(row["epoch"]), "update": int(row["update"])}
        best = False
        early, watch, keeper, rates = self.owner.early_stopping, self.watch, self.keeper, self.run.rates
        if early is not None and self._concerns(early.monitor, row, validated=validated):
            best = watch.judge(row, self.owner.between.errors, **where)
            if best and getattr(early, "restore_best", False):
                held = getattr(watch, "weights", None)
                with self.run.shown.evaluated():
                    watch.weights = _copied(self.owner.model, held) if self.restores_from_memory else None
            self.counters.stopped = self.counters.stopped or watch.stopped
        keep = best
        if (
            keeper is not None
            and keeper.settings.best
            and self._concerns(keeper.settings.best, row, validated=validated)
        ):
            keep = keeper.judge(row, **where) or keep
            if watch is None:
                best = keeper.best is not None and keeper.best.update == where["update"]
        if rates is not None and (validated or not self.val):  # each validation, or each epoch without one
            rates.observe(row)
        return best, keep

    def tell(self, row: Mapping[str, float], *, best: bool, validated: bool, epoch_ended: bool) -> None:
        """Tell the observers."""
        now, counters = time.perf_counter(), self.counters
        seconds, rows = now - self._last_time, counters.rows - self._last_rows
        record = Validation(
            epoch=int(row["epoch"]),
            update=int(row["update"]),
            metrics=dict(row),
            best=best,
            waited=0 if self.watch is None else self.watch.waited,
            patience=0 if self.watch is None else getattr(self.owner.early_stopping, "patience", 0),
            seconds=seconds,
            rows=rows,
            waiting=min(1.0, self.run.waited / seconds) if seconds else 0.0,
            skipped=counters.skipped,
        )
        self._last_time, self._last_rows, self.run.waited = now, counters.rows, 0.0
        for notify in self._on_validate if validated else []:
            notify(record)
        for notify in self._on_epoch if epoch_ended or not validated else []:
            notify(record)

    def saving_is_due(self, *, keep: bool, validated: bool, epoch_ended: bool) -> bool:
        """Whether to save now: the span has passed, it is among the best, it was asked for, or the run ends."""
        self.stop_clock()
        if self.keeper is None:
            return False
        rings = validated or (epoch_ended and not self.val)
        if self._saves is not None:
            rings = self._saves.rings(self.counters, epoch_ended=epoch_ended)
        return rings or keep or bool(self.counters.stopped) or self.wants_save

    def save(self) -> None:
        """Write a checkpoint of the whole state."""
        assert self.keeper is not None
        self.wants_save = False
        counters = self.counters
        update = counters.earlier_updates + counters.updates
        measured: dict[str, float] = {}
        for row in self.history[-2:]:  # a validation and the epoch's end may meet at one update
            measured |= row if row["update"] == update else {}
        with self.run.shown.evaluated():
            saved = self.keeper.save(
                state.gather(self.owner.parts()),
                update=update,
                epoch=counters.earlier_epochs + counters.epoch,
                metrics=measured,
            )
        for notify in self._on_save:
            notify(saved)

    def request_save(self) -> None:
        """Have the loop pause and save at the coming boundary."""
        if self.keeper is None:
            raise SettingError(message("save() without a checkpoint slot", fix='checkpoint=Checkpoint("runs/x")'))
        self.wants_save, self.run.due = True, 0

    def next_due(self) -> float:
        """Return the update at which the loop must pause next, ends of epochs apart."""
        counters, ends = self.counters, self.ends
        dues = [self._validates.next_update(counters)] if self.val else []
        dues += [bell.next_update(counters) for _, bell in self._probes]
        if self._saves is not None:
            dues.append(self._saves.next_update(counters))
        if ends.max_updates is not None:
            dues.append(ends.max_updates)
        if ends.max_seconds is not None:
            dues.append(counters.updates)  # time passes in updates that are held back too
        return min(dues, default=math.inf)

    @property
    def restores_from_memory(self) -> bool:
        """Whether early stopping's best weights are kept on the host: no checkpoint watches the same number."""
        early = self.owner.early_stopping
        if early is None or not getattr(early, "restore_best", False):
            return False
        settings = None if self.keeper is None else self.keeper.settings
        watched = (early.monitor, getattr(early, "mode", None))
        same = settings is not None and (settings.best, settings.mode or "min") == watched
        return not same or bool(getattr(early, "min_delta", 0))

    def restore_best(self) -> None:
        """Leave the model with the weights that count: averaged ones, and the best, where a slot promises them."""
        self.run.shown.leave()
        early, keeper, watch = self.owner.early_stopping, self.keeper, self.watch
        if watch is not None and watch.best is not None and getattr(early, "restore_best", False):
            weights = getattr(watch, "weights", None)
            if weights is None:
                self._load(watch.best)
            elif _layout(weights) != _layout(self.owner.model.state_dict()):
                _warn_of(watch.best, "are those of another model: it has changed since")
            else:
                self.owner.model.load_state_dict(weights)
                self.restored, self.left = watch.best, watch.best.update
        elif keeper is not None and keeper.settings.restore_best and keeper.best is not None:
            self._load(keeper.best)
        self.run.shown.leave()  # once more: the best that was loaded on top is what the next stage finds

    def _load(self, best: Best) -> None:
        """Load the weights of a best from its checkpoint; where that is gone, say so and keep the last."""
        path = self._path_of(best)
        if path is None:
            _warn_of(best, "were not kept")
            return
        weights = load_weights(path)  # raises where the file is damaged
        try:
            load_into(self.owner.model, weights, source=str(path))
        except CheckpointError:
            _warn_of(best, "are those of another model: it has changed since")
            return
        self.restored, self.left = best, best.update

    def result(self) -> Result:
        """Say how the run ended."""
        counters, passed = self.counters, self.passed
        best = None if self.keeper is None else self.keeper.best
        if passed is not None:
            best = None if passed["best"] is None else Best(**passed["best"])
            best = best and replace(best, path=self._path_of(best))
        elif best is None and self.watch is not None:
            best = self.watch.best
        weights = ", ".join([one for one in (self.run.shown.name, self._restored_text(best)) if one]) or "last"
        return Result(
            history=list(self.history),
            best=best,
            updates=counters.updates,
            epochs=counters.epoch,
            stopped=counters.stopped,
            seconds=counters.seconds,
            skipped=counters.skipped,
            weights=weights if passed is None else passed["weights"],
            notes=(*self._notes(), *self._saved_notes()) if passed is None else tuple(passed["notes"]),
        )

    def _concerns(self, monitor: str, row: Mapping[str, float], *, validated: bool) -> bool:
        """Whether a row is one to judge `monitor` by: validations for `val_...`, any row for training numbers.

        What only an `evaluate` of the user's own gives stands in the rows of validations.
        """
        trained = monitor in row or not self.owner.hooks.evaluates_itself
        return validated or (trained and not monitor.startswith("val_"))

    def _restored_text(self, best: Best | None) -> str:
        """Which best the model holds, by name where the run's `best` is one of another number."""
        restored = self.restored
        if restored is None:
            return ""
        by = f" by {restored.name}" if best is not None and best.name != restored.name else ""
        return f"best of epoch {restored.epoch}{by}"

    def _path_of(self, best: Best) -> Path | None:
        return self.path_at(best.update)

    def path_at(self, update: int) -> Path | None:
        """The checkpoint of an update, where it is still there."""
        keeper, name = self.keeper, update_name(update)
        kept = [] if keeper is None else [*keeper.saved, None if keeper.best is None else keeper.best.path]
        return next((path for path in kept if path is not None and path.name == name), None)

    def stop_clock(self) -> None:
        """Bring the seconds of this stage, over all of its sessions, up to now."""
        self.counters.seconds = self._before + time.perf_counter() - self._started

    def _notes(self) -> tuple[str, ...]:
        counters, total = self.counters, self.run.plan.updates
        rates = self.run.rates
        short = 0 if total is None or rates is None or rates.monitor is not None else total - counters.updates
        if counters.skipped and not counters.updates:
            return (f"nothing was trained: all {counters.skipped} updates were skipped",)
        if not counters.skipped or short <= 0 or self.ends.epochs != counters.epoch:
            return ()
        return (f"the schedule ended {short} short of its {total} updates: {counters.skipped} were skipped",)

    def _saved_notes(self) -> tuple[str, ...]:
        """From where a run that ended in an error can go on."""
        keeper, failed = self.keeper, self.owner.between.failed
        found = [] if keeper is None or not failed else [path.name for path in keeper.saved if is_name(path.name)]
        if not found:
            return ()
        return (f'saved at update {update_of(found[0])}: fit(..., resume="auto") goes on from there',)

    def end_reached(self) -> str:
        """Return which end of the `fit` is reached, or an empty string."""
        counters, ends = self.counters, self.ends
        if ends.max_updates is not None and counters.updates >= ends.max_updates:
            return f"max_updates={ends.max_updates} reached"
        if ends.epochs is not None and counters.epoch >= ends.epochs:
            past = f" (epoch {counters.epoch} was)" if counters.epoch > ends.epochs else ""
            return f"epochs={ends.epochs} reached{past}"
        if ends.max_seconds is not None and counters.seconds >= ends.max_seconds:
            return f"max_seconds={ends.max_seconds:g} reached"
        return ""


def _warn_of(best: Best, why: str) -> None:
    what = f"the weights of the best {best.name} (update {best.update})"
    warn(f"{what} {why}; the last ones stay", stacklevel=9)


def _layout(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state_dict.items()}


def _copied(model: Any, into: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """A host copy of the weights, into the tensors of the copy before where they fit."""
    state_dict = model.state_dict()
    if into is not None and _layout(into) == _layout(state_dict) and all(isinstance(v, Tensor) for v in into.values()):
        for name, value in state_dict.items():
            into[name].copy_(value)
        return into
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else deepcopy(value)  # extra state
        for name, value in state_dict.items()
    }
