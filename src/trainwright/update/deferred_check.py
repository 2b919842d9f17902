"""Judges updates on the device, where nobody waits: what it decided is heard some updates later, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.core.async_reads import Lagging
from trainwright.core.records import Update
from trainwright.optim.fused import ready_to_mask, step_of
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.table import TableRates
from trainwright.update import nonfinite_policy
from trainwright.update.device_side import DeviceJudge, DeviceRates, DeviceScale
from trainwright.update.finite_check import trace
from trainwright.update.nonfinite_policy import PATIENCE
from trainwright.update.numbers import Entry
from trainwright.update.optimizer_steps import Chosen, Steppers
from trainwright.update.reporter import Teller
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of an update when it is sent off: all but what the device has computed."""

    update: Update
    entries: list[Entry]
    values: dict[str, float]
    """What probes had returned for its record."""
    place: tuple[int, int]
    """Micro-batches and rows before it."""
    after: tuple[int, int]
    """The same after it."""
    kept: int
    """How often statistics had been kept when it was made."""
    norms: tuple[str, ...]
    """The optimizers whose norms are among its numbers."""
    window: Window
    """Its micro-batches as the data gave them, for an error that looks at them."""


class Behind(Teller):
    """Tells of each update when its numbers have arrived, and raises the error of one that was not finite.

    A loss, gradient or norm that is not finite raises a flag on the device that stays up: the kernels of that update
    and of those after it leave the weights and the optimizer's state as they are. So the error may come up to three
    updates late, and then all is as it was before the update that it names. Under a loss scale, and with "skip", an
    update may be held back alone (`DeviceJudge`): then the clock lies on the device too, and the host's runs ahead by
    the updates of which it has not heard yet, until the next pause.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.owner, run.steppers)
        device, policy = run.owner.device, run.owner.on_nonfinite
        self._run, self._ring = run, Lagging(device)
        self.flag: Tensor | None = None
        """What tells that an update had something in it that is not finite; None where nothing is judged."""
        self._place = (0, 0)
        self._known = 0
        """Updates of this stage that are known to be applied."""
        self._last = 0
        """The clock before the update that was heard of last."""
        self._idle = 0
        """Updates in a row that are known to be held back."""
        self._judge: DeviceJudge | None = None
        self._rates: DeviceRates | None = None
        if run.scaler is not None or policy == "skip":
            self._judge_there()

    def __bool__(self) -> bool:
        """Always: the numbers have to be heard, whoever watches."""
        return True

    def bind(self, steppers: Steppers) -> None:
        """Have the steps heed the flag of the gradients as they are grouped now."""
        flag = steppers.all.gradients.flag if self._run.checks else None
        flag = flag if self._judge is None else self._judge.held_back
        if self._rates is not None:
            self._rates.meet(len(steppers.rates))
        rates = None if self._rates is None else self._rates_now
        self._run.folds = all(stepper.may_fold() for stepper in steppers.all.steppers)
        for stepper in steppers.all.steppers:
            if flag is not None:
                ready_to_mask(stepper.optimizer)
            stepper.folds = self._run.folds
            scale = {"scale": partial(getattr, stepper, "scale")} if stepper.folds else {}
            stepper.step = step_of(stepper.optimizer, flag, rates, **scale)

    def begin(self) -> None:
        """Turn to the next update, on the host."""
        counters = self._run.counters
        self._place = (counters.batch, counters.rows)
        if not self._ring.waiting:
            self._begin(counters.updates)
        if self._rates is not None:
            self._rates.reach(self._known)

    def judge(self, flag: Tensor | None, chosen: Chosen) -> bool:
        """Have the device judge the loss, the gradients and the norms; the steps that follow heed it."""
        ledger = self._run.ledger
        self.flag = flag
        if flag is None:
            return True
        norms = [stepper.norm for stepper in chosen.steppers if isinstance(stepper.norm, Tensor)]
        if self._judge is None:
            chosen.gradients.check_too([*ledger.losses, *norms])
            return True
        chosen.gradients.check_too(norms)
        self._loss_flag.zero_()
        chosen.gradients.check_too(ledger.losses, self._loss_flag)
        self._judge.judge(flag, self._loss_flag)
        flag.zero_()
        return True

    def tell(self, window: Window, *, skipped: bool) -> None:
        """Send the numbers of this update on their way; hear of those that have arrived."""
        run, ledger = self._run, self._run.ledger
        norms = {one.name: one.norm for one in run.steppers.all.steppers if one.norm is not None}
        told = _Told(
            update=self._record(window, skipped=False, loss=nan, norm=None, values=run.steppers.numbers()),
            # A graph of autograd would keep the memory of an update until its numbers are heard.
            entries=[(name, _let_go(value), count, summed) for name, value, count, summed in ledger.collect()],
            values=ledger.values,
            place=self._place,
            after=(run.counters.batch, run.counters.rows),
            kept=run.statistics.kept,
            norms=tuple(norms),
            window=Window(window.batches, window.rows, move=window.mover),  # a new one: no batch stays on the device
        )
        if self._judge is not None:
            self._judge.count()
        self._ring.push(self._values(told.entries, list(norms.values())), partial(self._hear, told))

    def drain(self) -> None:
        """Wait for all updates that were made, and hear of them; the host's rates are then those of the last one."""
        heard = self._ring.waiting
        self._ring.drain()
        if heard and self._rates is not None and self._run.rates is not None:
            self._run.rates.apply(self._last)

    def _begin(self, updates: int) -> None:
        """Go on from what the host knows, when nothing is under way."""
        self._known = updates
        if self._judge is not None:
            self._judge.set_clock(updates)

    def _values(self, entries: list[Entry], norms: Sequence[float | Tensor]) -> list[float | Tensor]:
        """All numbers of an update, in the order in which they are heard."""
        verdict: list[float | Tensor] = [0.0 if self.flag is None else self.flag, 0.0]
        if self._judge is not None:
            verdict = [self._judge.ends, self._judge.held_back]
        return [*[entry[1] for entry in entries], *[entry[2] for entry in entries], *verdict, *norms]

    def _judge_there(self) -> None:
        run, device = self._run, self._run.owner.device
        scale = DeviceScale(run.scaler, device) if isinstance(run.scaler, LossScaler) else None
        run.scaler = scale
        self._judge = DeviceJudge(run.owner.on_nonfinite, device, scale)
        self._loss_flag = torch.zeros((), dtype=torch.float32, device=device)
        self._rates = DeviceRates(run.rates, device) if isinstance(run.rates, TableRates) else None

    def _rates_now(self) -> list[Tensor]:
        assert self._rates is not None
        assert self._judge is not None
        return self._rates.at(self._judge.clock)

    def _hear(self, told: _Told, numbers: list[float]) -> None:
        run, ledger, size = self._run, self._run.ledger, 2 * len(told.entries)
        in_hand = ledger.values
        ledger.take_for(told.entries, numbers, told.values)
        ends, held_back, *norms = numbers[size:]
        if ends:
            self._refuse(told, norms)
        rates = told.update.lrs if self._rates is None else tuple(self._rates.of(self._known))
        self._last = self._known
        self._count(held_back=held_back != 0)
        if self._idle >= PATIENCE:
            self._go_back(told.after)
            raise nonfinite_policy.nothing_applied(f"{PATIENCE} updates in a row", told=True)
        named = dict(zip(told.norms, norms, strict=True))
        update = replace(
            told.update,
            update=run.counters.earlier_updates + self._known,
            skipped=held_back != 0,
            lr=rates[0],
            lrs=rates,
            grad_norm=named.get(run.steppers.all.steppers[0].name),
        )
        grad_norms = {f"grad_norm_{name}": norm for name, norm in named.items()} if run.steppers.named else {}
        self._tell_whole(update, {"loss": ledger.loss, **ledger.values, **grad_norms})
        ledger.values = in_hand

    def _count(self, *, held_back: bool) -> None:
        """Take back what the host's clock was ahead, where an update was held back."""
        counters = self._run.counters
        if not held_back:
            self._known, self._idle = self._known + 1, 0
            return
        counters.updates -= 1
        counters.skipped += 1
        self._idle += 1

    def _refuse(self, told: _Told, norms: list[float]) -> None:
        """Put back what has moved since before an update, and raise."""
        run, counters = self._run, self._run.counters
        run.statistics.put_back(ago=run.statistics.kept - told.kept)
        run.gradients.lower_flags()
        self._go_back(told.place)
        run.ledger.window = told.window
        raise nonfinite_policy.error(
            update=counters.earlier_updates + counters.updates + 1,
            loss=run.ledger.loss,
            lr=told.update.lr if self._rates is None else self._rates.of(self._known)[0],
            norm=norms[0] if norms else None,
            counted=run.ledger.counted,
            trace=partial(trace, run),
        )

    def _go_back(self, place: tuple[int, int]) -> None:
        """Have the clock and the rates be those of the updates heard of, and forget those after them."""
        run, counters = self._run, self._run.counters
        self._ring.forget()
        run.ledger.collect()
        counters.updates, (counters.batch, counters.rows) = self._known, place
        if run.rates is not None:
            run.rates.apply(counters.updates)


def _let_go(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value
