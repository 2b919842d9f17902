"""Each fault of several processes is planted on all of them once, and the law World's own check fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from distributed.pool import RankFailed, pool

from . import test_world, test_world_data, test_world_ddp, test_world_ends, world_faults
from .world_runs import Case

pytestmark = pytest.mark.slow

SEEN_BY: dict[Callable[..., None], Callable[..., None]] = {
    world_faults.no_sync_is_dropped: partial(test_world_ddp.check_traveled, accumulate=4),
    world_faults.processes_weigh_alike: partial(test_world.check_case, case=Case(51, counts="tokens")),
    world_faults.gradients_are_summed: partial(test_world.check_case, case=Case(64, clip=0.05)),
    world_faults.what_counts_elsewhere_is_not_known: partial(test_world.check_case, case=Case(51, counts="tokens")),
    world_faults.a_dummy_counts: partial(test_world.check_case, case=Case(17, accumulate=3)),
    world_faults.noise_of_a_dummy_stays: test_world_data.check_dummy,
    world_faults.numbers_of_a_dummy_stay: partial(test_world.check_case, case=Case(17)),
    world_faults.every_epoch_has_the_order_of_the_first: partial(test_world_data.check_order, kind="own"),
    world_faults.each_process_shuffles_by_itself: partial(
        test_world_data.check_order, kind="loader of the global state"
    ),
    world_faults.the_schedule_steps_on_each_process: partial(test_world.check_case, case=Case(51)),
    world_faults.statistics_stay_apart: partial(test_world_data.check_normal, rows=24, size=2),
    world_faults.the_first_ones_numbers_are_reported: partial(test_world.check_case, case=Case(51)),
    world_faults.each_evaluates_all_rows: partial(test_world.check_case, case=Case(17)),
    world_faults.each_judges_by_its_own_numbers: partial(test_world_ends.check_early_stopping, size=2),
}


def with_fault(fault: Callable[..., None], function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    return pool(2).run(world_faults.planted, fault.__name__, function, args, seconds=seconds)


def with_processes_apart(*args: Any) -> list[Any]:
    """Some wait for others that went ways of their own, and the pool ends them; new ones start with the next call."""
    try:
        return with_fault(*args, seconds=20)
    except (RankFailed, TimeoutError) as ended:
        pool(2).close()
        raise AssertionError from ended


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_the_law_sees_the_fault(fault: Callable[..., None]) -> None:
    run = with_processes_apart if fault is world_faults.each_judges_by_its_own_numbers else with_fault
    with pytest.raises(AssertionError):
        SEEN_BY[fault](partial(run, fault))


def test_every_fault_is_seen() -> None:
    written = {one for one in vars(world_faults).values() if getattr(one, "__module__", "") == world_faults.__name__}
    assert written - {world_faults.planted} == set(SEEN_BY)
