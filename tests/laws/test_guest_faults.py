"""The Guest and the Traceless law must fail where what they guard is broken: each fault is planted and seen."""

from __future__ import annotations

from functools import partial

import pytest

from trainwright import EMA, TrainwrightError, Updates
from trainwright.precision.mixed_precision import matmul_precisions

from . import faults_guest as faults
from . import test_guest, test_guest_beside, test_guest_refused
from . import test_traceless_contract as contract
from .traceless_cases import ours

pytestmark = pytest.mark.slow

END = partial(test_guest.check_end, "normal")
LOADER = partial(contract.check_validated, "accumulate", "the same loader", ours)
BEFORE, AFTER, BETWEEN = "before the loss", "after the loss", "between gradients and step"

SEEN_BY = {getattr(faults, name): END for name in vars(faults) if name.startswith("leaves_")} | {
    faults.leaves_the_precision_of_a_backend: partial(test_guest.check_end, precision="tf32"),
    faults.leaves_a_model_awake: test_guest.check_left_in_eval,
    faults.seeds_the_process: test_guest_beside.check_generators,
    faults.draws_when_it_is_built: test_guest.check_construction,
    faults.passes_move_the_generators: (
        partial(test_guest_beside.check_generators, "validation"),
        partial(test_guest_beside.check_generators, "SWA"),
        partial(test_guest_beside.check_generators, "a probe"),
    ),
    faults.plans_draw: partial(test_guest_beside.check_generators, "questions"),
    faults.makes_tuples_of_batches: partial(test_guest_refused.check_batches, "list"),
    faults.trains_in_what_surrounds_it: (
        partial(test_guest_beside.check_inside, "bf16", "plain", "probe"),
        partial(test_guest_beside.check_inside, "bf16", "plain", BEFORE),
    ),
    faults.computes_in_the_autocast_around: (
        partial(test_guest_beside.check_inside, "bf16", "plain", BEFORE),
        partial(test_guest_beside.check_evaluation_inside, "bf16", "plain", BEFORE),
    ),
    faults.all_trainers_share_what_they_know: partial(test_guest_beside.check_inside, "tf32", "plain", BEFORE),
    faults.a_refused_fit_is_forgotten: partial(test_guest_refused.check_refused_next_fit, EMA(0.9)),
    faults.a_refused_fit_takes_the_rates: test_guest_refused.check_refused_next_fit,
    faults.a_pass_settles_the_seed: (
        test_guest_beside.test_an_evaluation_before_the_fit_decides_nothing_of_it,
        LOADER,
        partial(contract.check_run, "accumulate", BEFORE, data=ours),
    ),
    faults.a_pass_moves_gradients_and_statistics: partial(contract.check_run, "accumulate", BETWEEN),
    faults.a_pass_adds_to_gradients: (
        partial(contract.check_run, "accumulate", BETWEEN),
        partial(contract.check_run, "accumulate", BEFORE),
    ),
    faults.a_pass_moves_statistics: partial(contract.check_run, "accumulate", "end_epoch"),
    faults.a_pass_leaves_merged_weights_rounded: partial(contract.check_run, "accumulate", "begin_epoch"),
    faults.a_pass_freezes: partial(contract.check_run, "accumulate", "after_update"),
    faults.a_pass_is_noticed_by_a_backward: partial(contract.check_run, "EMA", AFTER),
    faults.a_pass_reads_casts_of_training: (
        partial(contract.check_run, "bf16, EMA", BEFORE),
        partial(contract.check_run, "bf16, schedule-free", BEFORE),
        contract.check_numbers,
    ),
    faults.a_pass_changes_the_state: partial(contract.check_run, "accumulate", "after_update"),
    faults.a_pass_moves_the_generator_of_the_loader: partial(contract.check_run, "accumulate", "begin_epoch"),
    faults.a_pass_logs_in_training: partial(contract.check_run, "accumulate", BEFORE),
    faults.a_pass_wakes_what_is_in_eval_mode: partial(contract.check_run, "accumulate", "end_epoch"),
    faults.a_pass_leaves_averaged_weights: partial(contract.check_run, "EMA", "after_update"),
    faults.a_pass_leaves_weights_rounded: partial(contract.check_run, "schedule-free", "after_update"),
    faults.a_pass_adapts_the_scale: partial(contract.check_run, "fp16", "after_update"),
    faults.a_pass_counts_its_rows: partial(contract.check_run, "accumulate", "after_update"),
    faults.a_plan_sets_the_rates: partial(contract.check_run, "accumulate", BETWEEN),
    faults.a_probe_is_a_callback: contract.test_a_probe_that_takes_no_care_changes_nothing,
    faults.a_pass_takes_over_the_workers: partial(contract.check_workers, Updates(1)),
}
SOUND: set[str] = set()
"""Checks that were seen to pass without a fault."""
SEEN = (AssertionError, RuntimeError, TrainwrightError)


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_the_law_sees_the_fault(fault, monkeypatch):
    if fault is faults.leaves_the_precision_of_a_backend and not matmul_precisions():
        pytest.skip("backends have no float32 precision of their own in this torch")
    checks = SEEN_BY[fault] if isinstance(SEEN_BY[fault], tuple) else (SEEN_BY[fault],)
    for check in checks:
        if repr(check) not in SOUND:
            check()
            SOUND.add(repr(check))
    with monkeypatch.context() as patch:
        fault(patch)
        for check in checks:
            with faults.process_put_back(), pytest.raises(SEEN):
                check()


def test_every_fault_is_seen_by_a_law():
    written = {value for name, value in vars(faults).items() if getattr(value, "__module__", "") == faults.__name__}
    helpers = {faults.nothing, faults._left, faults._nobody, faults.process_put_back}
    assert written - helpers == set(SEEN_BY)
