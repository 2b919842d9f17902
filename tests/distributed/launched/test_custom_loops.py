"""What belongs to one process alone: parts with `each_process`, a plan, settings that no process would use."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.launched import own_runs
from distributed.pool import Pool


def test_each_process_gets_its_own_part_back(ranks2: Pool, tmp_path: Path) -> None:
    assert ranks2.run(own_runs.saved_and_resumed, tmp_path) == [(10, 0), (11, 1)]


def test_a_plan_needs_no_other_process(ranks2: Pool) -> None:
    assert ranks2.run(own_runs.planned_alone) == [8, None]


def test_a_compression_beside_an_update_of_your_own_is_refused(ranks2: Pool) -> None:
    for text in ranks2.run(own_runs.compressed_beside_an_own_update):
        assert "compress" in text and "fix" in text


def test_a_step_by_hand_uses_the_averaged_gradients(ranks2: Pool) -> None:
    alone = own_runs.stepped_by_hand()
    for weights in ranks2.run(own_runs.stepped_by_hand):
        assert weights == pytest.approx(alone, abs=1e-12)


def test_a_model_that_is_wrapped_already_is_refused(ranks2: Pool) -> None:
    for text in ranks2.run(own_runs.wrapped_already):
        assert "Trainer(model.module, ...)" in text
