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
from . import test_custom_updates_numbers as told
from . import test_custom_updates_resume as resume
from . import test_custom_updates_sam as sam
from .own_updates import Closed, Scaled, Sharp, closed_by_hand, sharp_by_hand

pytestmark = pytest.mark.slow

SHARP_BAD = partial(sam.check_bad, Sharp, sharp_by_hand, sam.sharp_twins)
CLOSED_BAD = partial(sam.check_bad, Closed, closed_by_hand, sam.closed_twins)
BF16 = partial(sam.check_sharp, precision="bf16", dtype=torch.float32)

SEEN_BY = {
    faults_own.a_second_pass_adds_to_the_first: (sam.check_sharp, sam.check_closed),
    faults_own.a_second_pass_is_noted: (sam.check_sharp, partial(sam.check_sharp, 3), sam.check_closed),
    faults_own.a_second_pass_is_weighed_on_from_the_first: partial(sam.check_sharp, 3, trainer=sam.Counted),
    faults_own.a_window_weighs_its_batches_alike: (
        partial(sam.check_sharp, 3),
        partial(sam.check_closed, 3),
        sam.check_full_batch,
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
    faults_own.the_schedule_is_forgotten: partial(sam.check_rates, Sharp, sam.sharp_twins),
    faults_own.autocast_is_entered_once: BF16,
    faults.autocast_is_forgotten: (BF16, resume.check_cast),
    faults_own.only_the_first_optimizer_is_loaded: resume.check_gan_resumes,
    faults_own.an_average_is_taken_at_each_step: resume.check_average,
    faults_own.a_scaled_gradient_is_what_the_update_reads: (
        partial(sam.check_sharp, clip=0.1, precision=Scaled()),
        partial(gan.check_shared, gan.Each, precision=Scaled()),
    ),
    faults_own.the_closure_is_called_once: (
        sam.check_closed,
        sam.check_full_batch,
        partial(sam.check_rates, Closed, sam.closed_twins),
    ),
    faults_own.the_norm_of_the_last_trial_is_told: sam.check_closed_norm,
    faults_own.trials_are_never_judged: partial(sam.check_trial_is_put_back, "skip"),
    faults_own.a_bad_step_is_applied: (
        partial(SHARP_BAD, "skip"),
        partial(CLOSED_BAD, "skip"),
        partial(gan.check_bad_gan, "skip"),
        partial(gan.check_held_back, "D"),
        partial(gan.check_held_back, "G"),
    ),
    faults_own.the_error_names_the_update_before: (
        partial(SHARP_BAD, "raise"),
        partial(CLOSED_BAD, "raise"),
        partial(sam.check_trial_is_put_back, "raise"),
        partial(gan.check_bad_gan, "raise"),
    ),
    faults_own.state_stays_as_a_bad_window_left_it: (sam.check_state_put_back, partial(gan.check_bad_gan, "skip")),
    faults_own.statistics_stay_as_a_bad_window_left_them: partial(gan.check_bad_gan, "raise"),
    faults_own.minimize_zeroes_nothing: (gan.check_gan, gan.check_wasserstein, gan.check_gan_history),
    faults_own.minimize_applies_to_all: (gan.check_gan, gan.check_wasserstein),
    faults_own.a_name_is_ignored: partial(gan.check_shared, gan.Each),
    faults_own.each_step_counts_as_an_update: gan.check_gan,
    faults_own.only_the_first_schedule_is_applied: gan.check_gan,
    faults_own.each_optimizer_gets_the_clip_of_the_other: (gan.check_gan, partial(gan.check_shared, Trainer)),
    faults_own.the_norm_is_told_after_clipping: (gan.check_gan, partial(gan.check_shared, gan.Each)),
    faults_own.losses_of_several_steps_are_added_up: gan.check_wasserstein,
    faults_own.minimized_losses_count_windows: (
        gan.check_gan_history,
        partial(told.check_counts, *told.COUNTS["a sum"]),
    ),
    faults_own.named_losses_are_told_as_their_sum: gan.check_named,
    faults_own.one_that_is_held_back_holds_back_all: (own.check_scale, partial(gan.check_held_back, "D")),
    faults_own.one_that_is_held_back_is_no_update: (own.check_scale, partial(gan.check_held_back, "G")),
    faults_own.a_loss_that_is_bad_is_not_looked_at: partial(gan.check_held_back, "D"),
    faults_own.the_scale_adapts_at_each_step: own.check_scale,
    faults_own.the_last_step_decides_on_the_scale: own.check_scale,
    faults_own.a_flag_is_never_lowered: own.check_scale,
    faults_own.a_backward_by_hand_is_unscaled: (own.check_written_refused, own.check_half_written_refused),
    faults_own.a_scaled_minimize_speaks_for_the_update: own.check_half_written_refused,
    faults_own.an_unjudged_step_is_let_pass: own.check_unjudged_step_refused,
    faults_own.steps_by_hand_are_not_noticed: (
        partial(own.check_steps, own.StepsAlone),
        own.check_step_beside_held_back,
    ),
    faults_own.a_step_that_is_called_weighs_by_the_window: partial(told.check_step_called, told.EachBatch),
    faults_own.unfed_metrics_are_left_out: told.check_unfed_is_refused,
    faults_own.a_metric_is_weighed_by_the_window: told.check_metrics_of_each_batch,
    faults_own.metrics_are_not_fed: told.check_numbers,
    faults_own.logged_numbers_count_windows: told.check_numbers,
    faults_own.returned_numbers_are_dropped: told.check_numbers,
    faults_own.the_last_number_of_an_update_stands_for_all: told.check_log_between_steps,
    faults_own.gradients_are_zeroed_after_the_step: told.check_after_update,
    faults_own.after_update_runs_before_the_step: told.check_after_update,
    faults_own.no_norm_is_measured: told.check_wanted_norms,
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
