"""Each fault of which the laws Numbers, Schedule and Traceless warn is planted once, and the law's own check fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainwright import SumLoss, TrainwrightError
from trainwright.core.plan import Plan
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.evaluation import passes
from trainwright.fit.early_stopping import EarlyStopper
from trainwright.metrics.totals import Total
from trainwright.modules import modes
from trainwright.schedules.stepped import SteppedSchedule
from trainwright.schedules.table import TableSchedule
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.losses import KnownLoss
from trainwright.update.reporter import UpdateReporter

from . import test_numbers as numbers
from . import test_numbers_early_stopping as early_stopping
from . import test_numbers_many_rows as many_rows
from . import test_numbers_nan as nan
from . import test_schedule_stages as stages
from . import test_schedule_trainer as schedule
from . import test_traceless as traceless
from . import test_traceless_contract as contract

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
FAULTS: dict[str, tuple[Callable[[Patch], None], Callable[[], Any]]] = {}


def fault(check: Callable[..., Any], *arguments: Any):
    """Register what plants a fault, with the check that must find it."""

    def note(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[plant.__name__] = (plant, lambda: check(*arguments))
        return plant

    return note


def with_entries(patch: Patch, change: Callable[..., Any]) -> None:
    """Change the recorded numbers just before they are read."""
    close = LossTracker.read

    def changed(self, *more):
        self.unread = [change(*entry) for entry in self.unread]
        return close(self, *more)

    patch.setattr(LossTracker, "read", changed)


# Numbers.


@fault(numbers.test_training_loss_is_the_mean_over_rows_and_never_divided_by_accumulate, 2)
def the_training_loss_is_divided_by_accumulate(patch):
    add = LossTracker._add

    def divided(self, step_loss):
        size = 1 if self.window is None else len(self.window)
        add(self, replace(step_loss, loss=step_loss.loss / size))

    patch.setattr(LossTracker, "_add", divided)


@fault(numbers.test_training_loss_is_the_mean_over_rows_and_never_divided_by_accumulate, 1)
def the_training_loss_is_a_mean_of_batch_means(patch):
    with_entries(patch, lambda name, value, count, summed: (name, value, 1, summed))


@fault(numbers.test_validation_loss_is_the_mean_over_rows_for_an_uneven_last_batch)
def the_validation_loss_is_a_mean_of_batch_means(patch):
    def by_batch(self, output, target):
        return SumLoss(self.mean(output, target), 1)

    patch.setattr(KnownLoss, "evaluated", by_batch)


@fault(numbers.test_a_loss_over_elements_is_weighted_by_elements, 1)
def a_loss_over_elements_is_weighed_by_rows(patch):
    patch.setattr(LossTracker, "count", property(lambda self: self._rows))


@fault(numbers.test_a_micro_batch_that_counts_nothing_leaves_the_mean_of_the_others, 2)
def ignored_targets_count(patch):
    patch.setattr(KnownLoss, "count", lambda self, target: len(target))


@fault(numbers.test_with_class_weights_the_mean_is_over_the_weights)
def class_weights_are_no_counts(patch):
    patch.setattr(KnownLoss, "count", lambda self, target: len(target))


@fault(many_rows.check_more_rows_than_a_float32_counts)
def counts_are_kept_in_float32(patch):
    close = LossTracker.read

    def narrow(self, *more):
        read = close(self, *more)
        self._sums.counts = {name: torch.tensor(n, dtype=torch.float32).item() for name, n in self._sums.counts.items()}
        return read

    patch.setattr(LossTracker, "read", narrow)


@fault(numbers.check_metrics_are_exact_in_every_form)
def a_metric_is_a_mean_of_batch_means(patch):
    add = Total.add
    patch.setattr(Total, "add", lambda self, value, count: add(self, value, 1))


@fault(numbers.check_logged_numbers_are_weighted, 1)
def logged_numbers_have_no_count(patch):
    log = LossTracker.log
    patch.setattr(LossTracker, "log", lambda self, name, value, count: log(self, name, value, 1))


@fault(numbers.test_named_losses_are_reported_each_and_their_sum_as_the_loss, 2)
def named_losses_are_forgotten_where_several_are_weighed(patch):
    add = LossTracker._add
    patch.setattr(LossTracker, "_add", lambda self, step_loss: add(self, replace(step_loss, named=None)))


@fault(numbers.test_numbers_start_anew_in_each_epoch_and_evaluation)
def sums_go_on_over_epochs(patch):
    patch.setattr(LossTracker, "reset", lambda self: None)


@fault(nan.test_a_nan_in_one_training_row_shows_in_the_loss_of_the_epoch, "skip", 1)
def a_nan_is_filtered_from_the_training_loss(patch):
    with_entries(patch, lambda name, value, count, summed: (name, value, 0 if value != value else count, summed))


@fault(nan.test_a_nan_in_one_row_shows_in_every_number_of_the_evaluation)
def a_nan_is_filtered_from_metrics(patch):
    add = Total.add_sum
    patch.setattr(
        Total,
        "add_sum",
        lambda self, total, count: add(self, torch.as_tensor(total).nan_to_num(0.0), count),
    )


@fault(nan.test_a_nan_is_never_best_and_never_resets_patience)
def a_nan_beats_the_best(patch):
    beats = EarlyStopper._beats
    patch.setattr(EarlyStopper, "_beats", lambda self, value: math.isnan(value) or beats(self, value))


@fault(early_stopping.test_early_stopping_follows_its_definition_through_random_runs)
def a_nan_resets_patience(patch):
    judge = EarlyStopper.judge

    def lenient(self, metrics, errors, *, epoch, update):
        best = judge(self, metrics, errors, epoch=epoch, update=update)
        self.waited = 0 if math.isnan(metrics["val_loss"]) else self.waited
        return best

    patch.setattr(EarlyStopper, "judge", lenient)


@fault(early_stopping.test_min_delta_is_cumulative)
def the_best_moves_with_any_gain(patch):
    judge = EarlyStopper.judge

    def moving(self, metrics, errors, *, epoch, update):
        best = judge(self, metrics, errors, epoch=epoch, update=update)
        if not best and self.best is not None and metrics["val_loss"] < self.best.value:
            self.best = replace(self.best, value=metrics["val_loss"])
        return best

    patch.setattr(EarlyStopper, "judge", moving)


@fault(early_stopping.test_early_stopping_follows_its_definition_through_random_runs)
def patience_is_one_too_long(patch):
    stopped = EarlyStopper.stopped.fget
    patch.setattr(
        EarlyStopper, "stopped", property(lambda self: stopped(self) if self.waited > self.settings.patience else "")
    )


@fault(early_stopping.test_one_standard_error_is_taken_over_the_rows_of_the_validation)
def the_standard_error_is_over_batches(patch):
    each = KnownLoss.each_row
    patch.setattr(KnownLoss, "each_row", lambda self, o, t: each(self, o, t).mean().expand(len(t)))


# Schedule.


@fault(schedule.check_a_skipped_update_does_not_advance, "skip", {"epochs": 5})
def a_skipped_update_advances_the_schedule(patch):
    apply = TableSchedule.apply

    def by_tries(self, updates):
        self.tries = getattr(self, "tries", -1) + 1
        apply(self, self.tries)

    patch.setattr(TableSchedule, "apply", by_tries)


@fault(schedule.test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop, "cosine", "one", "plain")
def the_schedule_is_one_update_ahead(patch):
    apply = TableSchedule.apply
    patch.setattr(TableSchedule, "apply", lambda self, updates: apply(self, updates + 1))


@fault(
    schedule.test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop, "one cycle", "adam", "accumulate"
)
def the_total_counts_micro_batches(patch):
    patch.setattr(Plan, "updates_in", lambda self, epoch: self.batches)


@fault(schedule.test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop, "one cycle", "two", "accumulate")
def the_total_forgets_short_windows(patch):
    patch.setattr(Plan, "updates_in", lambda self, epoch: self.batches // self.accumulated(epoch))


@fault(
    schedule.test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop, "cosine, warmup", "two", "drop last"
)
def the_rate_that_is_reported_is_the_next_one(patch):
    whole = UpdateReporter.report

    def late(self, window, *, skipped):
        for bound in self._trainer._run.schedules.values():
            bound.apply(self._counters.updates)
        self._optimizer_steps.clear_used_lrs()
        whole(self, window, skipped=skipped)

    patch.setattr(UpdateReporter, "report", late)


@fault(stages.test_the_schedule_of_a_next_stage_starts_anew, "cosine, warmup")
def a_next_stage_starts_from_the_last_rate(patch):
    patch.setattr(TableSchedule, "restore_groups", lambda self: None)


@fault(
    schedule.test_plateau_is_torchs_stepped_after_each_validation, schedule.Plateau("val_loss", factor=0.5, patience=1)
)
def a_plateau_takes_a_nan_for_a_gain(patch):
    observe = SteppedSchedule.observe

    def hidden(self, metrics):
        observe(self, {name: -1e9 if math.isnan(value) else value for name, value in metrics.items()})

    patch.setattr(SteppedSchedule, "observe", hidden)


# Traceless.


@fault(traceless.test_evaluation_and_prediction_leave_everything_as_it_was, "DataLoader")
def evaluation_moves_the_random_state(patch):
    @contextmanager
    def moved(generators=()):
        yield

    patch.setattr(passes, "rng_preserved", moved)


@fault(traceless.test_evaluation_and_prediction_leave_everything_as_it_was, "batches")
def evaluation_ends_with_train_mode_for_every_module(patch):
    patch.setattr(modes, "_restore_modes", lambda each: each[0][0].train())  # the root


@fault(contract.check_validated)
def the_model_stays_in_eval_mode_after_validation(patch):
    patch.setattr(modes, "_restore_modes", lambda each: None)


@fault(contract.check_run, "accumulate", "begin_epoch")
def a_loaders_own_generator_is_moved(patch):
    patch.setattr(LoaderBatches, "generators", ())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_the_laws_own_check(name, monkeypatch):
    plant, check = FAULTS[name]
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, TrainwrightError)):
        check()
