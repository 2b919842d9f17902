"""The laws of custom updates must fail where what they guard is broken: each fault is planted and must be seen.

Without a fault each check passes: it is a test of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from trainwright import SettingError, StepError, Trainer

from . import faults, faults_own
from . import test_custom_updates as own
from . import test_custom_updates_gan as gan
from . import test_custom_updates_numbers as reported
from . import test_custom_updates_resume as resume
from . import test_custom_updates_sam as sam
from .own_updates import Closed, Scaled, Sharp, closed_by_hand, sharp_by_hand

pytestmark = pytest.mark.slow

SHARP_BAD = partial(sam.test_a_bad_window_leaves_the_weights_before_it, Sharp, sharp_by_hand, sam.sharp_twins)
CLOSED_BAD = partial(sam.test_a_bad_window_leaves_the_weights_before_it, Closed, closed_by_hand, sam.closed_twins)
SCALE = own.test_the_scale_adapts_once_per_update_and_an_overflow_holds_back_its_own_step
HALF_WRITTEN = own.test_a_hand_written_backward_beside_minimize_is_refused_under_a_loss_scale
LOGGED_BETWEEN = reported.test_a_number_logged_before_each_of_several_steps_is_reported_as_their_mean
BF16 = partial(sam.check_sharp, precision="bf16", dtype=torch.float32)

SEEN_BY = {
    faults_own.a_second_pass_adds_to_the_first: (sam.check_sharp, sam.check_closed),
    faults_own.a_second_pass_is_noted: (sam.check_sharp, partial(sam.check_sharp, 3), sam.check_closed),
    faults_own.a_second_pass_is_weighed_on_from_the_first: partial(sam.check_sharp, 3, trainer=sam.Counted),
    faults_own.a_window_weighs_its_batches_alike: (
        partial(sam.check_sharp, 3),
        partial(sam.check_closed, 3),
        sam.test_lbfgs_over_uneven_micro_batches_is_lbfgs_over_all_rows,
        partial(gan.check_shared, gan.Each, 3),
        gan.check_named,
    ),
    faults_own.clipping_is_forgotten: (
        partial(sam.check_sharp, clip=0.1),
        partial(sam.check_closed, clip=1.5),
        gan.check_gan,
        partial(gan.check_shared, gan.Each),
        partial(own.check_written, 0.1),
    ),
    faults_own.the_schedule_is_forgotten: partial(
        sam.test_the_clock_advances_once_per_update_however_often_gradients_are_computed, Sharp, sam.sharp_twins
    ),
    faults_own.autocast_is_entered_once: BF16,
    faults.autocast_is_forgotten: (BF16, resume.test_autocast_in_an_update_is_that_of_the_precision),
    faults_own.only_the_first_optimizer_is_loaded: resume.test_a_gan_resumes_in_the_middle,
    faults_own.an_average_is_taken_at_each_step: resume.test_an_average_is_taken_once_per_update_of_several_steps,
    faults_own.a_scaled_gradient_is_what_the_update_reads: (
        partial(sam.check_sharp, clip=0.1, precision=Scaled()),
        partial(gan.check_shared, gan.Each, precision=Scaled()),
    ),
    faults_own.the_closure_is_called_once: (
        sam.check_closed,
        sam.test_lbfgs_over_uneven_micro_batches_is_lbfgs_over_all_rows,
        partial(
            sam.test_the_clock_advances_once_per_update_however_often_gradients_are_computed, Closed, sam.closed_twins
        ),
    ),
    faults_own.the_norm_of_the_last_trial_is_reported: sam.test_the_norm_of_a_closures_update_is_its_first,
    faults_own.trials_are_never_judged: partial(sam.test_a_step_to_weights_that_are_not_finite_is_undone, "skip"),
    faults.applies_an_overflow: (
        partial(SHARP_BAD, "skip"),
        partial(CLOSED_BAD, "skip"),
        partial(gan.test_a_bad_window_of_a_gan_changes_no_weight, "skip"),
        partial(gan.test_an_optimizer_with_a_bad_loss_is_held_back_alone, "D"),
        partial(gan.test_an_optimizer_with_a_bad_loss_is_held_back_alone, "G"),
    ),
    faults_own.the_error_names_the_update_before: (
        partial(SHARP_BAD, "raise"),
        partial(CLOSED_BAD, "raise"),
        partial(sam.test_a_step_to_weights_that_are_not_finite_is_undone, "raise"),
        partial(gan.test_a_bad_window_of_a_gan_changes_no_weight, "raise"),
    ),
    faults_own.state_stays_as_a_bad_window_left_it: (
        sam.test_a_window_that_is_left_out_leaves_the_state_before_it,
        partial(gan.test_a_bad_window_of_a_gan_changes_no_weight, "skip"),
    ),
    faults_own.statistics_stay_as_a_bad_window_left_them: partial(
        gan.test_a_bad_window_of_a_gan_changes_no_weight, "raise"
    ),
    faults.gradients_are_never_zeroed: (
        gan.check_gan,
        gan.check_wasserstein,
        gan.test_the_losses_of_each_optimizer_are_reported_as_means_over_all_rows,
    ),
    faults_own.minimize_applies_to_all: (gan.check_gan, gan.check_wasserstein),
    faults_own.a_name_is_ignored: partial(gan.check_shared, gan.Each),
    faults_own.each_step_counts_as_an_update: gan.check_gan,
    faults_own.only_the_first_schedule_is_applied: gan.check_gan,
    faults_own.each_optimizer_gets_the_clip_of_the_other: (gan.check_gan, partial(gan.check_shared, Trainer)),
    faults_own.the_norm_is_reported_after_clipping: (gan.check_gan, partial(gan.check_shared, gan.Each)),
    faults_own.losses_of_several_steps_are_added_up: gan.check_wasserstein,
    faults_own.minimized_losses_count_windows: (
        gan.test_the_losses_of_each_optimizer_are_reported_as_means_over_all_rows,
        partial(reported.check_counts, *reported.COUNTS["a sum"]),
    ),
    faults_own.named_losses_are_reported_as_their_sum: gan.check_named,
    faults_own.one_that_is_held_back_holds_back_all: (
        SCALE,
        partial(gan.test_an_optimizer_with_a_bad_loss_is_held_back_alone, "D"),
    ),
    faults_own.one_that_is_held_back_is_no_update: (
        SCALE,
        partial(gan.test_an_optimizer_with_a_bad_loss_is_held_back_alone, "G"),
    ),
    faults_own.a_loss_that_is_bad_is_not_looked_at: partial(
        gan.test_an_optimizer_with_a_bad_loss_is_held_back_alone, "D"
    ),
    faults_own.the_scale_adapts_at_each_step: SCALE,
    faults_own.the_last_step_decides_on_the_scale: SCALE,
    faults_own.a_flag_is_never_lowered: SCALE,
    faults_own.a_backward_by_hand_is_unscaled: (
        own.test_a_hand_written_backward_is_refused_under_a_loss_scale,
        HALF_WRITTEN,
    ),
    faults_own.a_scaled_minimize_speaks_for_the_update: HALF_WRITTEN,
    faults_own.an_unjudged_step_is_let_pass: own.test_a_step_by_hand_is_refused_under_a_loss_scale,
    faults_own.steps_by_hand_are_not_noticed: (
        partial(own.test_a_step_by_hand_is_the_plain_loops_and_is_counted, own.StepsAlone),
        own.test_a_step_by_hand_beside_one_that_is_held_back_is_an_update,
    ),
    faults_own.a_step_that_is_called_weighs_by_the_window: partial(
        reported.test_a_step_that_an_update_calls_gives_the_plain_mean_of_its_batch, reported.EachBatch
    ),
    faults_own.unfed_metrics_are_left_out: reported.test_metrics_that_no_update_feeds_are_refused,
    faults_own.a_metric_is_weighed_by_the_window: reported.test_a_metric_is_weighed_by_the_rows_of_what_was_minimized,
    faults_own.metrics_are_not_fed: reported.check_numbers,
    faults_own.logged_numbers_count_windows: reported.check_numbers,
    faults_own.returned_numbers_are_dropped: reported.check_numbers,
    faults_own.the_last_number_of_an_update_stands_for_all: LOGGED_BETWEEN,
    faults_own.gradients_are_zeroed_after_the_step: reported.check_after_update,
    faults_own.after_update_runs_before_the_step: reported.check_after_update,
    faults_own.no_norm_is_measured: reported.test_norms_are_reported_of_each_optimizer_where_an_observer_wants_them,
}


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_the_law_of_custom_updates_sees_the_fault(fault, monkeypatch):
    checks = SEEN_BY[fault] if isinstance(SEEN_BY[fault], tuple) else (SEEN_BY[fault],)
    for check in checks:
        with monkeypatch.context() as patch:
            fault(patch)
            with pytest.raises((AssertionError, pytest.fail.Exception, SettingError, StepError)):
                check()


def test_every_fault_of_custom_updates_is_seen_by_a_law():
    home = faults_own.__name__
    written = {value for value in vars(faults_own).values() if getattr(value, "__module__", "") == home}
    assert written == {fault for fault in SEEN_BY if fault.__module__ == home}
