"""The Schedule law over stages: a later end plans anew, a next stage starts anew, and the plan says how long it is."""

from __future__ import annotations

import math

import pytest

from trainwright import Checkpoint, Cosine, batches

from .schedule_runs import CASES, adam_groups, by_hand, rows_of_data, run, two_groups


def check_a_later_end_plans_anew(tmp_path, schedule, scheduler):
    slot = {"checkpoint": Checkpoint(tmp_path), "accumulate": 2, "optimizer": two_groups}
    first, _, _ = run(schedule, epochs=2, **slot)
    assert first.seen == by_hand(scheduler, 8, optimizer=two_groups)
    with pytest.warns(UserWarning, match="re-planned: 8 -> 16 updates"):
        second, reported, result = run(schedule, epochs=4, resume="auto", **slot)
    longer = by_hand(scheduler, 16, optimizer=two_groups)
    assert second.seen == longer[8:]
    assert [update.lrs for update in reported] == [tuple(lr for lr, *_ in row) for row in longer[8:]]
    assert result.updates == 16


@pytest.mark.parametrize("case", ["one cycle", "cosine, warmup", "linear", "torch", "function"])
def test_a_resumed_stage_with_a_later_end_plans_anew_and_says_so(case, tmp_path):
    check_a_later_end_plans_anew(tmp_path, *CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_the_schedule_of_a_next_stage_starts_anew(case):
    schedule, scheduler = CASES[case]
    trainer, reported, _ = run(schedule, optimizer=adam_groups, epochs=2)
    expected = by_hand(scheduler, 14, optimizer=adam_groups)
    assert trainer.seen == expected
    trainer.seen = []
    trainer.fit(batches(rows_of_data(), 3), epochs=2)
    assert trainer.seen == expected
    assert [update.update for update in reported] == list(range(1, 29))


def test_a_rate_set_between_two_stages_is_where_the_next_schedule_starts():
    trainer, _, _ = run(Cosine(), epochs=1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
    trainer.seen = []
    trainer.fit(batches(rows_of_data(), 3), epochs=1)
    assert [row[0][0] for row in trainer.seen] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * u / 7)) / 2 for u in range(7)]
    )
