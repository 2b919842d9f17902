"""Faults that loops really have: each function plants one in the library, by a monkeypatch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from trainwright import MixedPrecision, Plan, SumLoss, Trainer, Window
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.evaluation import passes
from trainwright.fit.run import Run
from trainwright.modules import modes
from trainwright.optim import gradients
from trainwright.optim.gradients import Gradients
from trainwright.precision import LossScaler
from trainwright.schedules.table import TableSchedule
from trainwright.update import batches, loss_tracker, nonfinite_policy, strategy, window
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.losses import KnownLoss
from trainwright.update.strategy import UpdateStrategy


def around(patch, owner, name, *, before=None, after=None):
    """Do something more, before or after a method; both get its arguments."""
    whole = getattr(owner, name)

    def changed(*args, **kwargs):
        if before is not None:
            before(*args, **kwargs)
        returned = whole(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return returned

    patch.setattr(owner, name, changed)


def without(patch, owner, name, returned=None):
    """Leave a method out."""
    patch.setattr(owner, name, lambda *args, **kwargs: returned)


# Faults of a plain loop.


def draws_from_the_global_rng(patch):
    around(patch, Run, "finish_update", before=lambda *_: torch.rand(1))


def draws_before_the_loader(patch):
    around(patch, LoaderBatches, "epoch", before=lambda *_, **__: torch.rand(1))


def evaluation_moves_the_rng(patch):
    patch.setattr(passes, "rng_preserved", nullcontext)


def evaluation_leaves_eval_mode_behind(patch):
    patch.setattr(modes, "evaluating", lambda *roots: nullcontext([root.eval() for root in roots]))


def evaluation_in_train_mode(patch):
    patch.setattr(modes, "evaluating", lambda *roots: nullcontext())


def evaluation_wakes_what_was_in_eval_mode(patch):
    around(patch, passes, "evaluate", after=lambda trainer, *_, **__: trainer.model.train())


def gradients_are_rounded(patch):
    around(patch, Gradients, "multiply_and_check", before=lambda self, *_: self.multiply(1 + 1e-6))


def gradients_are_never_zeroed(patch):
    without(patch, Gradients, "zero")


def autocast_is_forgotten(patch):
    without(patch, MixedPrecision, "autocast")


def clipping_is_forgotten(patch):
    def apply(self):
        chosen = self._run.optimizer_steps.all
        applied = self._run.strategy.check(self._run.strategy.unscale_and_check(chosen.gradients), chosen)
        if applied:
            self.optimizer.step()
        return applied

    patch.setattr(Trainer, "apply_gradients", apply)


def unscales_after_clipping(patch):
    def apply(self):
        chosen = self._run.optimizer_steps.all
        chosen.steps[0].measure_and_clip()
        applied = self._run.strategy.check(self._run.strategy.unscale_and_check(chosen.gradients), chosen)
        if applied:
            self.optimizer.step()
        return applied

    patch.setattr(Trainer, "apply_gradients", apply)


def applies_an_overflow(patch):
    without(patch, UpdateStrategy, "apply_policy", True)


def counts_a_skipped_update(patch):
    def count(self, *_):
        self.counters.updates += self.strategy.status.applied is False

    around(patch, Run, "finish_update", after=count)


def scale_is_never_adapted(patch):
    without(patch, LossScaler, "adapt")


def an_overflow_puts_statistics_back(patch):
    around(
        patch,
        UpdateStrategy,
        "apply_policy",
        after=lambda self, *_, **__: self._run.snapshot and self._run.snapshot.restore(),
    )


def each_epoch_sets_train_mode(patch):
    around(patch, Run, "start_epoch", before=lambda self: self.trainer.model.train())


def rates_are_one_update_late(patch):
    whole = TableSchedule.apply
    patch.setattr(TableSchedule, "apply", lambda self, updates: whole(self, max(updates - 1, 0)))


def a_sum_is_divided_by_its_rows(patch):
    patch.setattr(
        batches, "loss_of", lambda trainer, output, target: SumLoss(trainer.loss(output, target), len(target))
    )


def a_mean_is_made_of_a_sum(patch):
    def loss_of(trainer, output, target):
        return SumLoss(trainer._hooks.known_loss._sum(output, target), trainer._tracker.count)

    patch.setattr(batches, "counted_loss_of", loss_of)


def sparse_rows_are_added_up_first(patch):
    def values(parameter, gradient):
        parameter.grad = gradient.coalesce()
        return parameter.grad._values()

    patch.setattr(gradients, "_values_of", values)


def reports_the_mean_of_batch_means(patch):
    without(patch, loss_tracker, "nll_total_weight")
    patch.setattr(LossTracker, "count", 1)


def sees_the_first_group_only(patch):
    def first(self, *optimizers, order=()):
        self.parameters = [p for optimizer in optimizers for p in optimizer.param_groups[0]["params"]]
        self._dropped = self.parameters

    around(patch, Gradients, "__init__", after=first)


# Faults of accumulation.


def _of_mean(count, is_sum):
    return 1 / count if is_sum and count else 1.0


def _weighed(patch, weight):
    """Weigh each micro-batch by a rule of one's own; its numbers are recorded as before."""
    patch.setattr(Window, "weight", lambda self, count, *, is_sum: weight(self, count, is_sum))
    patch.setattr(Window, "missing_factor", 1.0)


def divides_by_the_configured_number(patch):
    _weighed(patch, lambda window, count, is_sum: _of_mean(count, is_sum) / 3)


def takes_the_mean_of_means(patch):
    _weighed(patch, lambda window, count, is_sum: _of_mean(count, is_sum) / len(window))


def weighs_the_last_backward_more(patch):
    def weight(window, count, is_sum):
        share = window.rows[window.position] / sum(window.rows)
        return share * (1 + 1e-6 * (window.position == len(window) - 1))

    _weighed(patch, weight)


def divides_a_plain_sum(patch):
    _weighed(patch, lambda window, count, is_sum: 1 / len(window))


def drops_the_short_window(patch):
    whole = strategy.windows

    def full(given, size, **kwargs):
        return (window for window in whole(given, size, **kwargs) if len(window) == size)

    patch.setattr(strategy, "windows", full)


def windows_run_across_epochs(patch):
    whole, left = strategy.windows, []

    def crossing(given, size, **kwargs):
        for full in whole(chain(left.copy(), given), size, **kwargs):
            left.clear()
            if len(full) < size:
                left.extend(full.batches)
            else:
                yield full

    patch.setattr(strategy, "windows", crossing)


def reads_one_window_ahead(patch):
    whole = strategy.windows

    def ahead(given, size, **kwargs):
        coming = whole(given, size, **kwargs)
        held = next(coming, None)
        while held is not None:
            following = next(coming, None)
            yield held
            held = following

    patch.setattr(strategy, "windows", ahead)


def accumulates_as_in_epoch_0(patch):
    patch.setattr(Plan, "accumulated", lambda self, epoch: self.accumulate[0][1])


def zeroes_after_the_step_only(patch):
    zero = Gradients.zero
    without(patch, Gradients, "zero")
    around(patch, Trainer, "apply_gradients", after=lambda self: zero(self._run.gradients))


def clips_each_micro_batch(patch):
    def clip(self, batch):
        if self.model.first.weight.grad is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip.max_norm)

    around(patch, Trainer, "training_step", before=clip)


def counts_ignored_targets(patch):
    patch.setattr(KnownLoss, "count", lambda self, target: target.numel() if (target != -100).any() else 0)


def forgets_class_weights(patch):
    patch.setattr(KnownLoss, "count", lambda self, target: int((target != -100).sum()))


def the_clock_counts_micro_batches(patch):
    def count(self, window):
        self.counters.updates += len(window) - 1

    around(patch, Run, "finish_update", after=count)


def the_scaler_adapts_at_each_micro_batch(patch):
    around(patch, Trainer, "training_step", after=lambda self, batch: self._run.scaler.adapt(False))


def the_missing_factor_is_forgotten(patch):
    patch.setattr(Window, "missing_factor", 1.0)


def the_missing_factor_waits_for_the_step(patch):
    def late(self, *_):
        self._run.trainer._hooks = replace(self._run.trainer._hooks, has_custom_update=False)

    around(patch, UpdateStrategy, "finish_backward", before=late)


def returns_the_loss_before_it_is_weighed(patch):
    patch.setattr(UpdateStrategy, "complete_loss", lambda self, loss, factor: loss)


def adds_the_nan_of_a_mean_over_nothing(patch):
    patch.setattr(window, "zero_if_uncounted", lambda loss, count: loss)


def _rounds_weights(patch, dtype):
    whole = Window.weight
    patch.setattr(Window, "weight", lambda self, *count, **kind: _rounded(whole(self, *count, **kind), dtype))


def _rounded(weight, dtype):
    return torch.as_tensor(weight).to(dtype).double()


def divides_whole_numbers_in_float32(patch):
    _rounds_weights(patch, torch.float32)


def divides_in_half_precision(patch):
    _rounds_weights(patch, torch.float16)


def a_known_loss_outvotes_the_step(patch):
    whole = Window.weight

    def weight(self, count, *, is_sum):
        found = whole(self, count, is_sum=is_sum)
        self._total += 0 if self.counts is None else self.counts[self.position] - count
        return found

    patch.setattr(Window, "weight", weight)


def a_users_count_is_not_asked(patch):
    patch.setattr(LossTracker, "count", property(lambda self: self._rows))


def applies_a_window_that_counts_nothing(patch):
    without(patch, nonfinite_policy, "verdict_of", "apply")
