"""The law Resume must fail where a resume forgets something: each fault is planted, and the comparison must see it."""

from __future__ import annotations

import pytest

from . import resume_faults as faults
from .resume_cells import SETTINGS
from .resume_law import check, workers

pytestmark = pytest.mark.slow


def cell(**settings):
    """A cell that trains an MLP with `batches(...)`, and is killed in the middle of an epoch; else as it is given."""
    plain = {setting: values[0] for setting, values in SETTINGS.items()} | {"place": "mid-epoch"}
    assert set(settings) <= set(plain)
    return plain | settings


PLAIN, SHUFFLED = cell(), cell(data="shuffle")
WAITING, FAILING = (cell(data="shuffle", model="cnn", interrupt=how) for how in ("signal while waiting", "error"))
WINDOWS, CNN, EMA, FP16 = cell(accumulate=3), cell(model="cnn"), cell(average="EMA"), cell(precision="fp16")
VALIDATED, DUE = (cell(place="after validation", interrupt=how) for how in ("kill", "signal in an update"))

SEEN_BY = {
    faults.pythons_random_state_is_forgotten: PLAIN,
    faults.numpys_random_state_is_forgotten: PLAIN,
    faults.torchs_random_state_is_forgotten: PLAIN,
    faults.the_state_at_the_epochs_start_is_that_of_the_boundary: SHUFFLED,
    faults.the_state_after_the_skipping_is_kept: PLAIN,
    faults.a_pause_after_the_resume_draws_from_anywhere: DUE,
    faults.what_the_fetch_has_drawn_is_saved: WAITING,
    # OneCycle would refuse both by the length of the epoch, before the comparison sees them.
    faults.a_batch_is_lost: cell(schedule="StepLR"),
    faults.a_batch_is_trained_on_twice: cell(data="shuffle", schedule="StepLR"),
    faults.a_loaders_own_generator_is_forgotten: cell(data="generator", place="epoch boundary"),
    faults.the_workers_random_states_are_forgotten: cell(data="shuffle", workers="2"),
    faults.the_window_is_cut_where_it_was_left: WINDOWS,
    faults.the_optimizers_steps_are_counted_from_0: PLAIN,
    faults.the_moments_are_forgotten: PLAIN,
    faults.the_buffers_are_forgotten: CNN,
    faults.the_average_starts_anew: EMA,
    faults.the_average_forgets_how_many_it_has_taken: EMA,
    faults.the_scale_is_forgotten: FP16,
    faults.the_scalers_count_of_good_updates_starts_anew: cell(
        place="epoch boundary", data="shuffle", precision="fp16"
    ),
    faults.patience_starts_anew: VALIDATED,
    faults.the_best_is_forgotten: cell(place="after validation", precision="fp16"),
    faults.the_plateau_is_forgotten: cell(schedule="Plateau"),
    faults.the_schedule_starts_anew: cell(schedule="StepLR"),
    faults.the_sums_of_the_epoch_are_forgotten: PLAIN,
    faults.the_history_starts_anew: PLAIN,
    faults.the_users_state_is_forgotten: PLAIN,
    faults.it_is_forgotten_when_was_validated: VALIDATED,
    faults.a_pause_that_was_due_is_left_out: DUE,
    faults.what_is_saved_misses_the_last_update: PLAIN,
    faults.an_error_leaves_the_buffers_moved: FAILING,
    faults.an_error_leaves_the_random_states_moved: FAILING,
    faults.the_journal_is_not_cut: cell(place="epoch boundary"),
    faults.the_journal_is_cut_by_updates_alone: cell(precision="fp16", accumulate=3),
    faults.the_journal_keeps_lines_back: PLAIN,
}


@pytest.fixture(scope="module")
def checked():
    """What each fault leads to, and the cells without one; two processes check them."""
    with workers(2) as pool:
        healthy = {str(one): pool.submit(check, one) for one in SEEN_BY.values()}
        yield {fault: pool.submit(check, one, fault=fault) for fault, one in SEEN_BY.items()}, healthy
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_the_law_sees_the_fault(fault, checked):
    (found,), (healthy,) = checked[0][fault].result(), checked[1][str(SEEN_BY[fault])].result()
    assert not healthy.differences
    assert found.at, f"the run itself fails: {found.differences}"
    assert found.differences


def test_every_fault_is_seen_by_a_cell():
    written = {value for name, value in vars(faults).items() if getattr(value, "__module__", "") == faults.__name__}
    assert written - {faults._not_put_back, faults._skips} == set(SEEN_BY)
