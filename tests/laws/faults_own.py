"""Faults of updates of users' own: each function plants one in the library, by a monkeypatch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from trainwright import StepOutput, SumLoss, Trainer
from trainwright.core.trees import NamedParts
from trainwright.fit import run
from trainwright.fit.run import Run
from trainwright.optim.gradients import Gradients
from trainwright.schedules.table import TableSchedule
from trainwright.update import batches, loss_tracker, manual_optimization
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.optimizer_steps import OptimizerStep, OptimizerSteps
from trainwright.update.snapshot import Buffers, Tensors, UserState
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Window

from .faults import around, without

# The gradient computed again, and as a closure.


def a_second_pass_adds_to_the_first(patch):
    zero, again = Gradients.zero, []

    def every_other(self):
        again.append(self)
        if len(again) % 2:
            zero(self)

    patch.setattr(Gradients, "zero", every_other)


def a_second_pass_is_noted(patch):
    around(patch, LossTracker, "start_extra_pass", after=lambda self: setattr(self, "recording", True))


def a_second_pass_is_weighed_on_from_the_first(patch):
    def start_extra_pass(self):
        self.window.position, self.recording = -1, False

    patch.setattr(LossTracker, "start_extra_pass", start_extra_pass)


def a_window_weighs_its_batches_alike(patch):
    whole = Window.weight

    def weight(self, count, *, is_sum):
        whole(self, count, is_sum=is_sum)
        alike = 1 / count if is_sum and count else 1.0
        return 0.0 if count == 0 else alike / len(self)  # a mean over nothing would be NaN

    patch.setattr(Window, "weight", weight)


def clipping_is_forgotten(patch):
    def measure_and_clip(self):
        self.norm = None if self.clip is None else nn.utils.get_total_norm([p.grad for p in self.gradients.parameters])

    patch.setattr(OptimizerStep, "measure_and_clip", measure_and_clip)


def the_schedule_is_forgotten(patch):
    without(patch, TableSchedule, "apply")


def autocast_is_entered_once(patch):
    whole = Trainer.compute_gradients

    def compute(self, window):
        held = self._run.autocast
        if window.begun:
            self._run.autocast = nullcontext()
        try:
            return whole(self, window)
        finally:
            self._run.autocast = held

    patch.setattr(Trainer, "compute_gradients", compute)


def a_scaled_gradient_is_what_the_update_reads(patch):
    def finish_backward(self, window):
        self.pending_factor, self.status.is_scaled = 1.0, True
        return self._run.tracker.window_loss

    patch.setattr(UpdateStrategy, "finish_backward", finish_backward)


def the_closure_is_called_once(patch):
    whole = manual_optimization.step_by_closure

    def once(run, closure, name):
        found = []

        def first():
            if not found:
                found.append(closure())
            return found[0]

        return whole(run, first, name)

    patch.setattr(manual_optimization, "step_by_closure", once)


def the_norm_of_the_last_trial_is_reported(patch):
    limit = OptimizerStep.measure_and_clip

    def limited(self):
        limit(self)
        self.norm = float(self.norm)
        reported.append(self.norm)

    reported = []
    patch.setattr(OptimizerStep, "measure_and_clip", limited)
    around(
        patch,
        Run,
        "finish_update",
        before=lambda self, *_: setattr(self.optimizer_steps.all.steps[0], "norm", reported[-1]),
    )


def trials_are_never_judged(patch):
    patch.setattr(manual_optimization, "_all_finite", lambda weights: True)


def state_stays_as_a_bad_window_left_it(patch):
    without(patch, UserState, "restore")


def statistics_stay_as_a_bad_window_left_them(patch):
    without(patch, Tensors, "restore")
    without(patch, Buffers, "restore")


def the_error_names_the_update_before(patch):
    def before(self, *_, **__):
        self._run.counters.updates -= 1

    around(patch, UpdateStrategy, "apply_policy", before=before)


# Several optimizers.


def minimize_applies_to_all(patch):
    def minimize(self, loss, name=None):
        run = self._run
        run.strategy.status.minimizing = manual_optimization.backward_of(run, loss, name)
        applied = self.apply_gradients(name)
        for one in run.optimizer_steps.all.steps if name == "G" else ():
            one.step()
        return applied

    patch.setattr(Trainer, "minimize", minimize)


def a_name_is_ignored(patch):
    patch.setattr(OptimizerSteps, "choose", lambda self, name: self.all)


def each_step_counts_as_an_update(patch):
    whole = UpdateStrategy.check

    def check(self, found_inf, chosen):
        applied = whole(self, found_inf, chosen)
        self._run.counters.updates += applied and chosen.steps[0].name == "D"
        return applied

    patch.setattr(UpdateStrategy, "check", check)


def only_the_first_schedule_is_applied(patch):
    whole = run.bind_schedules

    def bind(*given):
        bound = whole(*given)
        for rates in list(bound.values())[1:]:
            rates.apply = lambda updates: None
        return bound

    patch.setattr(run, "bind_schedules", bind)


def each_optimizer_gets_the_clip_of_the_other(patch):
    def swapped(self, optimizers, *_, **__):
        names = list(optimizers)
        clips = {one.name: one.clip for one in self._steps}
        for one, other in zip(self._steps, reversed(names), strict=True):
            one.clip = clips[other]
            one.measures_or_clips = one.clip is not None

    around(patch, OptimizerSteps, "__init__", after=swapped)


def the_norm_is_reported_after_clipping(patch):
    def measure_and_clip(self):
        if self.clip is not None:
            self.clip(self.gradients.parameters)
        self.norm = self.gradients.norm()

    patch.setattr(OptimizerStep, "measure_and_clip", measure_and_clip)


def losses_of_several_steps_are_added_up(patch):
    def note(self, name, reported):
        self.unread.append((name, sum(value for value, _, _ in reported), reported[0][1], False))

    patch.setattr(LossTracker, "record_losses", note)


def minimized_losses_count_windows(patch):
    whole = LossTracker.record_losses
    patch.setattr(
        LossTracker,
        "record_losses",
        lambda self, name, reported: whole(self, name, [(one[0], 1, False) for one in reported]),
    )


def named_losses_are_reported_as_their_sum(patch):
    whole = LossTracker._add

    def add(self, step_loss):
        if step_loss.named is not None:
            step_loss.named = dict.fromkeys(step_loss.named, step_loss.loss.detach())
        whole(self, step_loss)

    patch.setattr(LossTracker, "_add", add)


def one_that_is_held_back_holds_back_all(patch):
    whole = UpdateStrategy.check

    def check(self, found_inf, chosen):
        return whole(self, found_inf, chosen) and not self.status.overflowed

    patch.setattr(UpdateStrategy, "check", check)


def one_that_is_held_back_is_no_update(patch):
    def applied_by_all(self, *_):
        status = self.strategy.status
        status.stepped = status.applied = bool(status.applied) and not status.overflowed

    around(patch, Run, "finish_update", before=applied_by_all)


def a_loss_that_is_bad_is_not_looked_at(patch):
    whole = UpdateStrategy.check

    def check(self, found_inf, chosen):
        status = self.status
        if status.minimizing is not None:
            loss, *rest = status.minimizing
            status.minimizing = (loss.nan_to_num(), *rest)
            for parameter in chosen.gradients.parameters:
                parameter.grad.nan_to_num_()
            chosen.gradients.lower_flags()
        return whole(self, found_inf, chosen)

    patch.setattr(UpdateStrategy, "check", check)


def only_the_first_optimizer_is_loaded(patch):
    def load(self, tree):
        name = next(iter(self.parts))
        self.parts[name].load_state_dict(tree[name])

    patch.setattr(NamedParts, "load_state_dict", load)


def an_average_is_taken_at_each_step(patch):
    def take(self, *_):
        self._run.average.take(self._run.counters.updates)

    around(patch, UpdateStrategy, "check", before=take)


# Scale, steps by hand, numbers.


def the_scale_adapts_at_each_step(patch):
    around(patch, UpdateStrategy, "check", after=lambda self, *_: self.scaler.adapt(self.status.overflowed))


def the_last_step_decides_on_the_scale(patch):
    def forget(self, *_):
        self.status.overflowed = None

    around(patch, UpdateStrategy, "check", before=forget)


def a_flag_is_never_lowered(patch):
    without(patch, Gradients, "lower_flags")


def a_backward_by_hand_is_unscaled(patch):
    around(patch, UpdateStrategy, "check", before=lambda self, *_: setattr(self.status, "is_scaled", True))


def a_scaled_minimize_speaks_for_the_update(patch):
    whole = manual_optimization.backward_of

    def backward_of(run, loss, name):
        run.strategy.status.is_scaled = True
        return whole(run, loss, name)

    patch.setattr(manual_optimization, "backward_of", backward_of)


def an_unjudged_step_is_let_pass(patch):
    without(patch, UpdateStrategy, "adapt_scale")


def steps_by_hand_are_not_noticed(patch):
    patch.setattr(Run, "watching_steps", lambda self: nullcontext())


def metrics_are_not_fed(patch):
    whole = LossTracker.record_minimized
    strip = lambda returned: returned.loss if type(returned) is StepOutput else returned  # noqa: E731
    patch.setattr(LossTracker, "record_minimized", lambda self, returned: whole(self, strip(returned)))


def a_step_that_is_called_weighs_by_the_window(patch):
    def loss_of(trainer, output, target):
        known, window = trainer._hooks.known_loss, trainer._tracker.window
        return (
            trainer.loss(output, target)
            if window.is_single
            else SumLoss(known._sum(output, target), trainer._tracker.count)
        )

    patch.setattr(batches, "counted_loss_of", loss_of)


def unfed_metrics_are_left_out(patch):
    around(patch, LossTracker, "means", before=lambda self, *_: setattr(self, "must_feed", False))


def a_metric_is_weighed_by_the_window(patch):
    patch.setattr(loss_tracker, "find_rows", lambda output: None)


def logged_numbers_count_windows(patch):
    patch.setattr(LossTracker, "count", property(lambda self: 1))


def returned_numbers_are_dropped(patch):
    whole = LossTracker.record_returned
    patch.setattr(
        LossTracker, "record_returned", lambda self, given: None if type(given) is dict else whole(self, given)
    )


def the_last_number_of_an_update_stands_for_all(patch):
    def forget(self, *_):
        for name, *_others in self.unread:
            self.terms.pop(name, None)

    around(patch, LossTracker, "read", before=forget)


def gradients_are_zeroed_after_the_step(patch):
    around(patch, Run, "finish_update", after=lambda self, *_: self.gradients.zero())


def after_update_runs_before_the_step(patch):
    whole = OptimizerStep.__init__

    def late(self, name, optimizer, **kwargs):
        whole(self, name, optimizer, **kwargs)
        step, held = self.step, [p.detach().clone() for p in self.gradients.parameters]

        def shown_old():
            for kept, p in zip(held, self.gradients.parameters, strict=True):
                kept.copy_(p.detach())
            step()
            with torch.no_grad():
                for kept, p in zip(held, self.gradients.parameters, strict=True):
                    p.copy_(kept)

        self.step = shown_old

    patch.setattr(OptimizerStep, "__init__", late)


def no_norm_is_measured(patch):
    around(patch, OptimizerStep, "measure_and_clip", after=lambda self: setattr(self, "norm", None))
