"""One fit under way: windows in, applied updates and numbers out, between two pauses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainwright.base.contracts import Rates, Scaler, Source, listeners
from trainwright.base.plan import Plan
from trainwright.base.progress import Counters
from trainwright.base.records import Update
from trainwright.run.ledger import Ledger
from trainwright.run.owner import Owner
from trainwright.run.state import Random
from trainwright.runtime import late
from trainwright.runtime.gradients import Gradients
from trainwright.runtime.kernels import step_of
from trainwright.runtime.modules import running_statistics
from trainwright.runtime.randomness import random_state, set_random_state
from trainwright.slots import nonfinite
from trainwright.slots.clip import ClipNorm
from trainwright.slots.precision import check_weights
from trainwright.slots.window import Window, windows

PATIENCE = 1000
"""Updates in a row without an applied step after which the run ends in an error."""


class Run:
    """What the loop reads and writes at each update, bound once before the first."""

    _applied: bool | None = None
    """What `apply_gradients` said in this update; None where it was not called."""
    _stepped = False
    """Whether the optimizer made a step in this update, as far as anybody watches."""
    _norm: float | None = None
    _unjudged = False
    """Whether gradients were checked that nobody has judged."""
    _idle = 0
    """Updates in a row in which no step was applied."""

    def __init__(self, owner: Owner, source: Source, plan: Plan) -> None:
        self.owner, self.source, self.plan = owner, source, plan
        self.counters: Counters = owner.counters
        self.ledger: Ledger = owner.ledger
        self.random = Random()
        self._take_groups()
        self.step = step_of(owner.optimizer)
        """One step of the optimizer."""
        self.rates: Rates | None = None if owner.schedule is None else owner.schedule.bind(owner.optimizer, plan)
        precision, device = owner.precision, owner.device.type
        self.autocast = None if precision is None else precision.autocast(device)
        self.scaler: Scaler | None = None if precision is None else precision.scaler(device)
        check_weights(self.scaler, self.gradients.parameters)
        self.checks = owner.nonfinite != "ignore" or self.scaler is not None
        """Whether gradients are looked at before they are applied."""
        wants_norm = any("grad_norm" in observer.wants for observer in owner.observers)
        self.measures_norm = wants_norm and not isinstance(owner.clip, ClipNorm)
        """Whether the norm must be computed although clipping does not give it."""
        self.factor: float | Tensor = 1.0
        """What the gradients are still to be multiplied by: the loss scale undone, and the window's share."""
        self.due: float = 0
        """The update at which something falls due and the loop pauses."""
        self.epoch_over = False
        self.waited = 0.0
        """Seconds spent waiting for data since the last record."""
        self.notify_update = listeners(owner.observers, "on_update")
        self._statistics = running_statistics(owner.model) if owner.nonfinite != "ignore" else []
        self._kept = [statistic.clone() for statistic in self._statistics]

    @contextmanager
    def watching_steps(self) -> Iterator[None]:
        """Notice the steps that an `update` of the user's own makes without `apply_gradients`."""
        if not self.owner.hooks.updates_itself:
            yield
            return
        handle = self.owner.optimizer.register_step_post_hook(self._note_step)
        try:
            yield
        finally:
            handle.remove()

    def windows(self) -> Iterator[Window]:
        """The windows of what is left of the epoch; fewer where the run is stopped in the middle of it."""
        counters, owner, clock = self.counters, self.owner, time.perf_counter
        size = self.plan.accumulated(counters.epoch)
        left = None if self.plan.epoch_updates is None else self.plan.epoch_updates - math.ceil(counters.batch / size)
        self.epoch_over = False
        begun = clock()
        grouped = windows(
            self._batches(),
            size,
            rows=owner.hooks.rows,
            count=owner.hooks.count,
            always_count=owner.hooks.counts_itself,
            move=owner.hooks.move,
        )
        for window in islice(grouped, left):
            self.waited += clock() - begun
            self.ledger.begin(window)
            self._applied, self._norm, self._stepped = None, None, False
            if len(owner.optimizer.param_groups) != self._groups:
                self._take_groups()
            if self._unjudged:  # an update of the user's own gave its gradients up
                self.gradients.lower_flags()
            if self._kept:
                torch._foreach_copy_(self._kept, self._statistics)
            yield window
            if counters.stopped and not self.at_end:
                return
            begun = clock()
        self.epoch_over = True

    def owe(self, window: Window, loss: Tensor) -> Tensor:
        """Note what the gradients must still be multiplied by, pay at once where user code reads them; pay the loss."""
        owed = window.owed
        self.factor = owed
        if self.scaler is not None:
            self.factor = self.factor * self.scaler.factor()
        if self.owner.hooks.updates_itself:
            self.settle()
        return loss * owed if isinstance(owed, Tensor) or owed != 1.0 else loss

    def settle(self) -> Tensor | None:
        """Multiply the gradients by what is owed; return the flag of non-finite ones where they are checked."""
        factor, self.factor = self.factor, 1.0
        if self.checks:
            self._unjudged = True
            return self.gradients.multiply_and_check(factor)
        if isinstance(factor, Tensor) or factor != 1.0:
            self.gradients.multiply(factor)
        return None

    def judge(self, flag: Tensor | None, norm: Tensor | None) -> bool:
        """Read the update's numbers, and say whether it may be applied; raises where that is the policy."""
        ledger, self._unjudged = self.ledger, False
        if norm is not None:
            self._norm, *read = ledger.close(norm) if flag is None else ledger.close(norm, flag)
        else:
            self._norm, read = None, ledger.close() if flag is None else ledger.close(flag)
        if not read:
            self._applied = True
            return True
        # Finite elements can have a norm that overflows: clipping by it would apply a gradient of zeros.
        bad = read[0] != 0.0 or (self._norm is not None and not late.finite(self._norm))
        if not bad and (not ledger.noted or late.finite(ledger.loss)):
            if self.scaler is not None:
                self.scaler.adapt(False)
            self._applied = True
            return True
        applied = self._applies_anyway(bad)
        self._applied = applied or bool(self._applied)  # one step that was applied makes it an update
        return applied

    def record(self, window: Window, returned: Any) -> None:
        """Count the update, and tell who watches updates."""
        ledger, counters = self.ledger, self.counters
        if returned is not None and (not ledger.noted or type(returned) is dict):
            ledger.note_returned(returned)
        if ledger.waiting:
            ledger.close()
        counters.batch += len(window.batches)
        counters.rows += window.rows[0] if window.alone else sum(window.rows)
        if self._applied if self._applied is not None else self._stepped:
            counters.updates += 1
            self._idle = 0
        else:
            counters.skipped += self._applied is not None
            self._idle += 1
            if self._idle >= PATIENCE:
                raise nonfinite.nothing_applied(f"{PATIENCE} updates in a row", told=self._applied is not None)
        if self.notify_update:
            self._tell(window)

    def check_epoch(self, updates_before: int) -> None:
        """Refuse to go on after an epoch in which an `update` of the user's own made no step at all."""
        if self.counters.updates == updates_before and self._idle and self._applied is None:
            raise nonfinite.nothing_applied("an epoch", told=False)

    def _take_groups(self) -> None:
        """Take over the optimizer's parameters as they are grouped now; a group may be added at any time."""
        self.gradients = Gradients(self.owner.optimizer)
        self._groups = len(self.owner.optimizer.param_groups)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def learning_rates(self) -> tuple[float, ...]:
        """The rate of each parameter group, as the last update used it."""
        return tuple(float(group["lr"]) for group in self.owner.optimizer.param_groups)

    @property
    def at_end(self) -> bool:
        """Whether the epoch has nothing left, as far as its length tells."""
        counters, plan = self.counters, self.plan
        if plan.epoch_updates is not None:
            return math.ceil(counters.batch / plan.accumulated(counters.epoch)) >= plan.epoch_updates
        return counters.batch == self.source.length  # data that give more than they said go on

    def _batches(self) -> Iterator[Any]:
        """The epoch's iterator, at its batch; on resume every random state is what it was there."""
        counters, random = self.counters, self.random
        loaded, random.loaded = random.loaded, None
        if loaded is None or not counters.batch:
            if loaded is not None:
                set_random_state(loaded)
            if self.owner.checkpoint is not None:
                random.epoch_start = random_state()
            return iter(self.source.epoch(counters.epoch))
        set_random_state(random.epoch_start)
        iterator = iter(self.source.epoch(counters.epoch, skip=counters.batch))
        set_random_state(loaded)
        return iterator

    def _applies_anyway(self, bad: bool) -> bool:
        """Deal with a loss or gradient that is not finite, as the policy says."""
        owner, ledger, scaler = self.owner, self.ledger, self.scaler
        verdict = nonfinite.judge(
            owner.nonfinite,
            loss_is_finite=late.finite(ledger.loss) or not ledger.noted,
            gradient_is_finite=not bad,
            scaled=scaler is not None,
            at_floor=scaler is not None and scaler.at_floor,
        )
        self.gradients.lower_flags()
        if scaler is not None:
            scaler.adapt(bad)
        if verdict in ("raise", "skip") and self._kept:
            torch._foreach_copy_(self._statistics, self._kept)
        if verdict == "raise":
            raise nonfinite.error(
                update=self.counters.earlier_updates + self.counters.updates + 1,
                loss=ledger.loss,
                lr=self.learning_rates()[0],
                norm=self._norm,
                counted=ledger.counted if ledger.noted else None,
                whole=not owner.hooks.updates_itself,
            )
        return verdict == "apply"

    def _tell(self, window: Window) -> None:
        counters, rates = self.counters, self.learning_rates()
        update = Update(
            update=counters.earlier_updates + counters.updates,
            epoch=counters.earlier_epochs + counters.epoch,
            loss=self.ledger.loss,
            lr=rates[0],
            lrs=rates,
            grad_norm=self._norm,
            rows=sum(window.rows),
            skipped=not (self._stepped if self._applied is None else self._applied),
            values=dict(self.ledger.values),
        )
        for notify in self.notify_update:
            notify(update)
