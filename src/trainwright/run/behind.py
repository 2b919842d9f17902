"""Judges updates on the device, where nobody waits: what it decided is heard some updates later, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING

from torch import Tensor

from trainwright.base.records import Update
from trainwright.run.numbers import Entry
from trainwright.run.steppers import Chosen, Steppers
from trainwright.run.telling import Teller
from trainwright.runtime.fused import ready_to_mask
from trainwright.runtime.kernels import step_of
from trainwright.runtime.lagging import Lagging
from trainwright.slots import nonfinite
from trainwright.slots.window import Window

if TYPE_CHECKING:
    from trainwright.run.run import Run


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of an update when it is sent off: all but what the device has computed."""

    update: Update
    entries: list[Entry]
    values: dict[str, float]
    """What probes had returned for its record."""
    before: tuple[int, int, int]
    """Updates, micro-batches and rows before it."""
    kept: int
    """How often statistics had been kept when it was made."""


class Behind(Teller):
    """Tells of each update when its numbers have arrived, and raises the error of one that was not finite.

    A loss, gradient or norm that is not finite raises a flag on the device that stays up: the kernels of that update
    and of those after it leave the weights and the optimizer's state as they are. So the error may come up to three
    updates late, and then all is as it was before the update that it names.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.owner, run.steppers)
        self._run, self._ring = run, Lagging(run.owner.device)
        self._flag: Tensor | None = None
        self._before = (0, 0, 0)

    def __bool__(self) -> bool:
        """Always: the numbers have to be heard, whoever watches."""
        return True

    def bind(self, steppers: Steppers) -> None:
        """Have the steps heed the flag of the gradients as they are grouped now."""
        flag = steppers.all.gradients.flag if self._run.checks else None
        for stepper in steppers.all.steppers:
            if flag is not None:
                ready_to_mask(stepper.optimizer)
            stepper.step = step_of(stepper.optimizer, flag)

    def judge(self, flag: Tensor | None, chosen: Chosen) -> bool:
        """Raise the flag for the loss and the norms too; the steps that follow heed it."""
        counters = self._run.counters
        self._before = (counters.updates, counters.batch, counters.rows)
        self._flag = flag
        if flag is not None:
            norms = [stepper.norm for stepper in chosen.steppers if isinstance(stepper.norm, Tensor)]
            chosen.gradients.check_too([*self._run.ledger.losses, *norms])
        return True

    def tell(self, window: Window, *, skipped: bool) -> None:
        """Send the numbers of this update on their way; hear of those that have arrived."""
        run, ledger = self._run, self._run.ledger
        steppers = run.steppers
        told = _Told(
            update=self._record(window, skipped=skipped, loss=nan, norm=None, values=steppers.numbers()),
            entries=ledger.collect(),
            values=ledger.values,
            before=self._before,
            kept=run.statistics.kept,
        )
        norms = {one.name: one.norm for one in steppers.all.steppers if one.norm is not None}
        entries, flag = told.entries, 0.0 if self._flag is None else self._flag
        values = [*[entry[1] for entry in entries], *[entry[2] for entry in entries], flag, *norms.values()]
        self._ring.push(values, partial(self._hear, told, tuple(norms)))

    def drain(self) -> None:
        """Wait for all updates that were made, and hear of them."""
        self._ring.drain()

    def _hear(self, told: _Told, names: Sequence[str], numbers: list[float]) -> None:
        ledger, size = self._run.ledger, 2 * len(told.entries)
        in_hand = ledger.values
        ledger.take_for(told.entries, numbers, told.values)
        bad, norms = numbers[size], dict(zip(names, numbers[size + 1 :], strict=True))
        if bad:
            self._refuse(told, list(norms.values()))
        named = {f"grad_norm_{name}": norm for name, norm in norms.items()} if self._run.steppers.named else {}
        first = norms.get(self._run.steppers.all.steppers[0].name)
        self._tell_whole(replace(told.update, grad_norm=first), {"loss": ledger.loss, **ledger.values, **named})
        ledger.values = in_hand

    def _refuse(self, told: _Told, norms: list[float]) -> None:
        """Put back what has moved since before an update, and raise."""
        run, counters = self._run, self._run.counters
        self._ring.forget()
        run.ledger.collect()
        run.statistics.put_back(ago=run.statistics.kept - told.kept)
        counters.updates, counters.batch, counters.rows = told.before
        run.gradients.lower_flags()
        raise nonfinite.error(
            update=counters.earlier_updates + counters.updates + 1,
            loss=run.ledger.loss,
            lr=told.update.lr,
            norm=norms[0] if norms else None,
            counted=run.ledger.counted,
        )
