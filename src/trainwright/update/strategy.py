"""How the updates of a run are made: the base class of the immediate and of the deferred check."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.precision.base import LossScale
from trainwright.update.nonfinite_policy import Trace
from trainwright.update.reporter import UpdateReporter
from trainwright.update.status import Outcome
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients
    from trainwright.update.optimizer_steps import Chosen


class UpdateStrategy:
    """How the updates of a run are made. A run has one, chosen before its first update.

    `update`: makes the update of a window; the trainer's own method, or what splits windows for want of memory.
    `trace`: finds where the update in hand stopped being finite, for the error.
    """

    reports = False
    """Whether `report` does anything."""
    updates_ahead = 0
    """Updates that may have been made since the one whose numbers were read last."""
    in_closure = False
    """Whether an optimizer is making a step that calls a closure of ours."""
    _is_unchecked = False
    """Whether gradients were scaled and flagged, and no check has read the flag."""

    def __init__(self, run: Run, *, update: Callable[[Window], Any], trace: Callable[[], Trace]) -> None:
        self.update, self.trace = update, trace
        self.scaler: LossScale | None = run.scaler
        """The loss scale; None without one."""
        self.reporter = UpdateReporter(run.owner, run.steppers)
        self._run = run

    def begin(self, window: Window) -> None:
        """Prepare the update of a window: forget a flag that no check has read."""
        if self._is_unchecked:  # a custom `update` has given its gradients up
            self._run.steppers.lower_flags()
            self._is_unchecked = False

    def scale_gradients(self, gradients: Gradients) -> Tensor | None:
        """Multiply gradients by the factor that is missing, and check them, in one pass.

        Returns the flag of values that are not finite, a 0-dim tensor; None where nothing is checked.
        """
        run = self._run
        factor, run.factor = run.factor, 1.0
        if run.spread is not None:
            run.spread.settle(gradients.parameters)
        found_inf = None
        if run.checks:
            self._is_unchecked = True
            found_inf = gradients.multiply_and_check(factor)
        elif isinstance(factor, Tensor) or factor != 1.0:
            gradients.multiply(factor)
        if run.spread is not None:
            run.spread.note(gradients.parameters)
        return found_inf

    def check(self, found_inf: Tensor | None, chosen: Chosen) -> bool:
        """Return whether the chosen optimizers may step; raise where the policy says so."""
        raise NotImplementedError

    def refuse(self, chosen: Chosen) -> bool:
        """Return whether a step that was made and undone counts as applied; raise where the policy says so."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the update: what it has computed is complete."""

    def report(self, window: Window) -> None:
        """Report the update of a window to the observers."""

    def discard(self) -> None:
        """Drop what the window in hand has computed: it is run again."""
        run = self._run
        run.gradients.zero()
        run.outcome, run.factor = Outcome(), 1.0
        for stepper in run.steppers.all.steppers:
            stepper.norm, stepper.factor, stepper.scale = None, 1.0, None
        if not self.updates_ahead:  # else an earlier update may have raised the flag, which is not read yet
            run.steppers.lower_flags()

    def flush(self) -> None:
        """Wait for the numbers of all updates, and raise what they say. No-op where they are read at once."""

    def close(self) -> None:
        """Release what only updates need, at the end of the run."""
        self.update = self._run.owner.update

    def regroup(self) -> None:
        """Take over the optimizers' parameters as they are grouped now. No-op here."""
