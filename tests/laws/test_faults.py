"""Every law must fail where what it guards is broken: each fault is planted, and the check of its law must see it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from trainwright import Updates

from . import faults, test_plain, test_plain_evaluation, test_window, test_window_cuts, test_window_update
from .window_cases import UNEVEN

pytestmark = pytest.mark.slow

ONCE = test_window_update.test_clip_schedule_scaler_and_clock_act_once_per_update
BY_EPOCH = test_window_cuts.test_accumulation_by_epoch_cuts_each_epoch_anew
ONE_MEAN = partial(test_window_update.test_an_overridden_update_finds_the_windows_own_gradient_and_loss, "a mean")
SQUARES = partial(test_window.check_known, UNEVEN, "squares")

SEEN_BY = {
    faults.draws_from_the_global_rng: test_plain.check_loop,
    faults.draws_before_the_loader: test_plain.check_loader,
    faults.evaluation_moves_the_rng: test_plain_evaluation.check_validation,
    faults.evaluation_leaves_eval_mode_behind: partial(test_plain_evaluation.check_validation, Updates(4)),
    faults.evaluation_in_train_mode: partial(test_plain_evaluation.check_evaluate, "cnn"),
    faults.evaluation_wakes_what_was_in_eval_mode: test_plain_evaluation.check_evaluate,
    faults.gradients_are_rounded: test_plain.check_loop,
    faults.gradients_are_never_zeroed: test_plain.check_loop,
    faults.autocast_is_forgotten: partial(test_plain.check_loop, precision="bf16"),
    faults.clipping_is_forgotten: test_plain.check_clip,
    faults.unscales_after_clipping: (
        partial(test_plain.check_fp16, 0.5),
        ONCE,
    ),
    faults.applies_an_overflow: test_plain.check_fp16,
    faults.counts_a_skipped_update: test_plain.check_fp16,
    faults.scale_is_never_adapted: test_plain.check_fp16,
    faults.an_overflow_puts_statistics_back: partial(test_plain.check_fp16, kind="cnn"),
    faults.each_epoch_sets_train_mode: test_plain.test_a_frozen_batchnorm_stays_in_eval_mode,
    faults.rates_are_one_update_late: test_plain.test_a_rate_per_epoch_is_torchs,
    faults.a_sum_is_divided_by_its_rows: test_plain.check_sum,
    faults.a_mean_is_made_of_a_sum: test_plain.check_loop,
    faults.sparse_rows_are_added_up_first: test_plain.check_sparse,
    faults.reports_the_mean_of_batch_means: test_plain.check_loop,
    faults.sees_the_first_group_only: test_plain.check_groups,
    faults.divides_by_the_configured_number: SQUARES,
    faults.takes_the_mean_of_means: SQUARES,
    faults.weighs_the_last_backward_more: test_window_update.test_no_backward_of_a_window_weighs_more_than_another,
    faults.divides_a_plain_sum: test_window.test_a_sum_is_summed_over_the_window,
    faults.drops_the_short_window: (SQUARES, BY_EPOCH),
    faults.windows_run_across_epochs: (SQUARES, BY_EPOCH),
    faults.reads_one_window_ahead: test_window_cuts.check_on_policy,
    faults.accumulates_as_in_epoch_0: BY_EPOCH,
    faults.zeroes_after_the_step_only: test_window_update.test_gradients_left_over_from_before_never_enter,
    faults.clips_each_micro_batch: partial(test_window.check_known, replace(UNEVEN, clip=0.05), "squares"),
    faults.counts_ignored_targets: partial(test_window.check_known, UNEVEN, "ignored"),
    faults.forgets_class_weights: partial(test_window.check_known, UNEVEN, "weights"),
    faults.the_clock_counts_micro_batches: ONCE,
    faults.the_scaler_adapts_at_each_micro_batch: ONCE,
    faults.the_missing_factor_is_forgotten: partial(test_window.check_returned, UNEVEN, "a mean"),
    faults.the_missing_factor_waits_for_the_step: ONE_MEAN,
    faults.returns_the_loss_before_it_is_weighed: ONE_MEAN,
    faults.adds_the_nan_of_a_mean_over_nothing: partial(
        test_window_update.test_an_overridden_update_finds_the_windows_own_gradient_and_loss, "a mean by torch"
    ),
    faults.divides_whole_numbers_in_float32: partial(test_window.check_returned, UNEVEN, "a mean over a tensor"),
    faults.divides_in_half_precision: partial(test_window.check_float32, UNEVEN, test_window.rows_loss, "numbers"),
    faults.a_known_loss_outvotes_the_step: partial(test_window.check_own_count_wins, UNEVEN),
    faults.a_users_count_is_not_asked: partial(test_window.check_count, UNEVEN),
    faults.applies_a_window_that_counts_nothing: partial(test_window_update.check_empty_window, 2, "skip"),
}


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_the_law_sees_the_fault(fault, monkeypatch):
    checks = SEEN_BY[fault] if isinstance(SEEN_BY[fault], tuple) else (SEEN_BY[fault],)
    with monkeypatch.context() as patch:
        fault(patch)
        for check in checks:
            with pytest.raises(AssertionError):
                check()
    for check in checks:
        check()


def test_every_fault_is_seen_by_a_law():
    public = {name: value for name, value in vars(faults).items() if not name.startswith("_")}
    written = {value for value in public.values() if getattr(value, "__module__", "") == faults.__name__}
    assert written - {faults.around, faults.without} == set(SEEN_BY)
