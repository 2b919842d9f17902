"""Takes down the numbers of one loop: what steps, updates, probes and users give, with what each is a mean over."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, message
from trainwright.core.records import Count, StepOutput, SumLoss
from trainwright.core.suggestions import check_name
from trainwright.metrics.metrics import Meters
from trainwright.update.hooks import Hooks
from trainwright.update.losses import CountObserver, Outcome, counted_by_torch, read_outcome
from trainwright.update.numbers import Numbers, Told, mean_of, number
from trainwright.update.window import Window, above_nothing, find_rows, rows_of


class Ledger(Numbers):
    """Takes down what the steps and updates of a loop give, each number with its count."""

    must_feed = False
    """Whether training steps are the only ones that can feed the metrics: then one that does not is refused."""
    noted = False
    """Whether a loss of the window in hand was taken down."""
    _within = False
    """Whether an epoch is in hand, so that a number that is logged has one to belong to."""
    count_source: CountObserver | None = None
    """What finds the count of a mean in an evaluation, where no gradient holds it."""

    def __init__(self, meters: Meters | None = None, hooks: Hooks | None = None) -> None:
        super().__init__(meters)
        self.window: Window | None = None
        """The window in hand in training; None in an evaluation."""
        self.batch: Any = None
        """The host batch in hand in an evaluation."""
        self._counter = None if hooks is None else hooks.count
        self._trusts_counter = hooks is not None and hooks.counts_itself
        self._rows_of = rows_of if hooks is None else hooks.rows
        self.told_by_torch = counted_by_torch
        """What finds the count in a loss that torch has made."""
        self.noting = True
        """Whether what steps return is taken down: not in a second pass over the same window."""
        self._probed: dict[str, float] = {}
        """What probes have returned since the last update, for the record of the next."""

    def begin(self, window: Window) -> None:
        """Turn to the next window."""
        if self._entries:  # what `after_update` has logged and no record has told
            self.close()
        self.window, self._within = window, True
        self.noted = False
        self.loss = math.nan
        if self.values or self._probed:
            self.values, self._earlier, self._probed = self._probed, {}, {}
        self.noting = True

    def begin_again(self) -> None:
        """Run the same window once more: only its first pass is noted (SAM and LBFGS run it again, elsewhere)."""
        assert self.window is not None
        self.window.begin()
        self.noting = False

    @property
    def count(self) -> Count:
        """The count of the micro-batch that is about to run, as the host knows it."""
        window = self.window
        if window is None:
            return self._rows_of(self.batch) if self._counter is None else self._counter(self.batch)
        index = window.position + 1
        if not window.begun or index == len(window.batches):  # none is in hand: before the first, or after the last
            return sum(window.rows)
        if window.counts is not None:
            return window.counts[index]
        return window.rows[index] if self._counter is None else self._counter(window.batches[index])

    def weigh(self, returned: Any) -> Tensor:
        """Take down what a training step returned; return it weighed by its share of the window, for `backward`."""
        window = self.window
        assert window is not None
        if window.is_weighed:  # where the step ran, with several processes
            window.is_weighed = False
            weighed: Tensor = returned
            return weighed
        window.position = position = window.position + 1
        if type(returned) is StepOutput:
            if self.meters is not None and self.noting:
                self.meters.update(returned.output, returned.target, window.rows[position])
            returned = returned.loss
        elif self.must_feed:
            self.check_fed(returned)
        if window.alone and type(returned) is Tensor and returned.ndim == 0:  # the common case needs no weight
            if self.noting:
                found = None if self._trusts_counter else self.told_by_torch(returned)
                count = self._default_count(position) if found is None else found
                self._entries.append(("loss", returned, count, False))
                self.noted = True
            return returned
        return self._weighed(read_outcome(returned), position)

    def alone(self, returned: Any) -> tuple[Tensor, Count, bool]:
        """Return a loss that an `update` of the user's own minimizes by itself, its count, and whether it is a sum.

        What does not tell its count counts the window's rows.
        """
        assert self.window is not None
        rows = sum(self.window.rows)
        stands_in = not rows and self.window.all_rows > 0  # of several processes the others have all of its rows
        if type(returned) is StepOutput:
            if self.meters is not None and not stands_in:  # one batch of the window, perhaps
                own = find_rows(returned.output)
                self.meters.update(returned.output, returned.target, rows if own is None else own)
            returned = returned.loss
        outcome = read_outcome(returned)
        count = rows if outcome.count is None or stands_in else outcome.count
        if outcome.named is not None:
            self._entries += [(name, value, count, outcome.summed) for name, value in self._claimed(outcome.named)]
        if outcome.summed and outcome.count is not None:
            return outcome.loss / above_nothing(outcome.count), count, False
        return outcome.loss, count, outcome.summed

    def check_fed(self, returned: Any) -> None:
        """Refuse what a step returned where metrics read outputs and it holds none."""
        fed = type(returned) is StepOutput and returned.output is not None
        if not fed and self.meters is not None and self.meters.reads_output:
            fix = "return StepOutput(loss, output, target) from the step"
            raise self._unfed(f"the step returned {type(returned).__name__}", fix=fix)

    def note(self, returned: Any) -> None:
        """Take down what an evaluation step returned for the batch in hand."""
        if not self.noting:
            return
        if type(returned) is StepOutput:
            if self.meters is not None:
                self.meters.update(returned.output, returned.target, self._rows_of(self.batch))
            returned = returned.loss
            if returned is None:
                return
        if type(returned) is SumLoss and type(returned.count) is int:  # what the default step returns, nearly always
            outcome = Outcome(returned.total, returned.count, True)
        else:
            outcome = read_outcome(returned)
        loss, count = outcome.loss, outcome.count
        if count is None:
            count = self._rows_of(self.batch) if outcome.summed else self._count_of(loss)
        if outcome.named is None and type(count) is int and count > 0 and loss.is_cpu and loss.ndim == 0:
            value = host_reads.host_value(loss)  # there is nothing to wait for, and the next loss gets its memory
            self._sums["loss"] = self._sums.get("loss", 0.0) + (value if outcome.summed else value * count)
            self._counts["loss"] = self._counts.get("loss", 0.0) + count
        else:
            self._note(outcome, count)

    def note_returned(self, returned: Any) -> None:
        """Take down what an `update` returned: a loss where no step of this window gave one, and other numbers."""
        rows = 0 if self.window is None else sum(self.window.rows)
        for name, value in (returned if isinstance(returned, dict) else {"loss": returned}).items():
            if name != "loss":
                check_name(name, "returned")
            if name != "loss" or not self.noted:
                self._entries.append((name, number(name, value), rows, False))
            self.noted = self.noted or name == "loss"

    def note_told(self, name: str, told: list[Told]) -> None:
        """Take down the losses that `minimize` was given under one name."""
        self._entries += [(name, *one) for one in told]

    def note_sum(self, told: list[list[Told]]) -> None:
        """Take down the sum of the losses of several names as the window's loss, where no step gave one."""
        if self.noted:
            return
        self.noted = True
        if len(told) == 1:
            self.note_told("loss", told[0])
            return
        assert self.window is not None
        self.note_told("loss", [(sum(mean_of(each) for each in told), sum(self.window.rows), False)])

    def note_probed(self, numbers: Any, what: str) -> None:
        """Take down what a probe returned: a dict of numbers, or nothing."""
        if numbers is None:
            return
        if not isinstance(numbers, dict):
            have = f"a {type(numbers).__name__}"
            raise SettingError(message(f"{what} returned {have}", want="a dict of numbers, or None", where=False))
        for name in numbers:
            check_name(name, "probed")
            self._claim(name, "probed number")
        read = dict(
            zip(numbers, host_reads.read([number(name, value) for name, value in numbers.items()]), strict=True)
        )
        self._probed |= read
        self._entries += [(name, value, 1, False) for name, value in read.items()]

    def log(self, name: str, value: float | Tensor, count: Count | None) -> None:
        """Take down a number of the user's own; `count` defaults to that of the batch in hand."""
        check_name(name, "logged")
        self._claim(name, "logged number")
        if not self._within and self.batch is None:
            fix = f"self.log({name!r}, ...) in after_update(self), or self.print(...) here"
            raise SettingError(message(f"log({name!r}, ...) outside a step", want="a call from a step", fix=fix))
        if self.noting:
            self._entries.append((name, number(name, value), self.count if count is None else count, False))

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return every mean since the last `reset`, metrics and derived numbers included; NaN over nothing.

        Metrics that only the steps of validation feed are left out of training's numbers.
        """
        self.close()
        means = {name: (self._sums.get(name, 0.0) / n if n else math.nan) for name, n in self._counts.items()}
        if self.meters is None or (self.window is not None and not self.meters.fed):
            if self.must_feed and self.meters is not None:
                fix = "self.minimize(StepOutput(loss, output, target)), or self.compute_gradients(window)"
                raise self._unfed("no update gave an output and a target", fix=fix)
            return {prefix + name: value for name, value in means.items()}
        return {prefix + name: value for name, value in means.items()} | self.meters.compute(prefix, means)

    def begin_at(self, tree: dict[str, Any]) -> None:
        """Go back to saved sums, and forget what was noted since."""
        self._entries, self._probed, self._earlier = [], {}, {}
        self.load_state_dict(tree)

    def reset(self) -> None:
        """Start new sums, of an epoch to come."""
        self._within = False
        super().reset()

    def state_dict(self) -> dict[str, Any]:
        """The running sums, and what probes have returned for the record of the update to come."""
        return super().state_dict() | {"probed": dict(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was saved."""
        super().load_state_dict(tree)
        self._probed = dict(tree.get("probed", {}))

    def _unfed(self, why: str, *, fix: str) -> SettingError:
        names = [] if self.meters is None else list(self.meters.names)
        unfed = f"the metrics {', '.join(names)} are" if len(names) > 1 else f"metric {''.join(map(repr, names))} is"
        want = f"the output and target that the metric{'s read' if len(names) > 1 else ' reads'}"
        return SettingError(message(f"{unfed} never fed: {why}", want=want, fix=fix, where=False))

    def _weighed(self, outcome: Outcome, position: int) -> Tensor:
        """Note an outcome; return it weighed by its share of the window."""
        window = self.window
        assert window is not None
        count = outcome.count
        if count is None and not outcome.summed:
            found = None if self._trusts_counter else self.told_by_torch(outcome.loss)
            count = self._default_count(position) if found is None else found
        self._note(outcome, window.rows[position] if count is None else count)
        own = window.counts is None or count is not window.counts[position]
        return window.weighed(outcome.loss, count, summed=outcome.summed, own=own)

    def _default_count(self, position: int) -> Count:
        """What a mean is over that did not tell, and that torch's own NLL did not make: what `count` says, or rows."""
        window = self.window
        assert window is not None
        if window.counts is not None:
            return window.counts[position]
        return window.rows[position] if self._counter is None else self._counter(window.batches[position])

    def _count_of(self, loss: Tensor) -> Count:
        """What a mean is over that did not tell: as in training, what torch divided by, else `count`."""
        found = None if self.count_source is None else self.count_source.count_of(loss)
        return self.count if found is None else found

    def _note(self, outcome: Outcome, count: Count) -> None:
        if not self.noting:
            return
        self._entries.append(("loss", outcome.loss.detach(), count, outcome.summed))
        self.noted = True
        if outcome.named is not None:
            self._entries += [(name, value, count, outcome.summed) for name, value in self._claimed(outcome.named)]
