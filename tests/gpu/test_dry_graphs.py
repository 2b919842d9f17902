"""The tests on a GPU, tried on the CPU with emulated graphs: what they expect of recordings and replays holds there."""

from __future__ import annotations

from typing import Any

import gpu_runs
import pytest
import test_capture_cuda as capture
import test_fast_cuda as fast
import test_feeding_cuda as feeding
import test_same_cuda as same_cuda
import test_silence_cuda as silence
import torch
from gpu_runs import Case

from laws import emulated_graph
from trainwright import Fast
from trainwright.run import judging

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have updates be judged late, recorded and replayed on the CPU."""
    emulated_graph.emulate(monkeypatch)
    monkeypatch.setattr(judging, "LATE", {"cpu"})
    for module in (gpu_runs, fast, feeding):
        monkeypatch.setattr(module, "fast_for", lambda _, graphs, **others: Fast(cuda_graphs=graphs, **others))
    monkeypatch.setattr(capture.Hindered, "recorded", staticmethod(lambda _: emulated_graph._is_recording()))


CASES = [
    Case("adamw", 0.25, "ragged", None, "step"),
    Case("sgd", None, "four", "bf16", "one cycle"),
    Case("adamw", 0.25, "one", "fp16", "one cycle"),
    Case("sgd", 0.25, "ragged", "bf16", "cycled"),
    Case("adamw", None, "one", "fp16", "cycled"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_captured_is_eager(case: Case) -> None:
    same_cuda.test_captured_is_eager_is_the_loop_by_hand(case, CPU)


def test_evaluations_noise_and_changes_between_replays() -> None:
    same_cuda.test_dropout_and_batchnorm_advance_as_in_the_loop_by_hand("rows", "four", None, CPU)
    same_cuda.test_evaluations_between_replays_see_the_weights_of_their_time("metrics", CPU)
    same_cuda.test_what_a_step_logs_is_told_for_each_replay(CPU)
    same_cuda.test_what_is_changed_between_epochs_reaches_the_updates_after("adamw", CPU)
    same_cuda.test_batches_of_several_shapes_are_each_trained_on(CPU)
    same_cuda.test_recordings_of_several_shapes_draw_from_one_stream_of_random_numbers(CPU)


@pytest.mark.parametrize("build", [one for one in capture.HINDERED if one is not capture.Synchronises])
def test_recordings_that_fail(build: Any) -> None:
    capture.test_after_a_recording_that_failed_the_run_goes_on_as_without(build, CPU)
    capture.test_what_must_be_recorded_and_cannot_be_is_an_error_that_says_why(build, CPU)


def test_steps_that_a_replay_would_not_make() -> None:
    capture.test_a_step_that_a_replay_would_not_make_is_made_as_it_is(capture.Turns, CPU)
    capture.test_a_hook_of_a_module_is_called_for_each_batch(CPU)
    capture.test_two_trainers_take_turns(CPU)


def test_interrupts_resumes_and_saves(tmp_path: Any) -> None:
    capture.test_an_interrupt_between_replays_ends_with_a_whole_update(CPU)
    capture.test_a_run_that_is_resumed_is_the_one_that_was_never_left("require", CPU, tmp_path / "resumed")
    capture.test_saves_beside_replays_hold_the_weights_of_their_update("require", CPU, tmp_path / "saved")


@pytest.mark.parametrize("kind", fast.LATE)
def test_late_errors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast.test_an_error_that_comes_late_leaves_what_one_at_once_does(kind, 11, CPU, monkeypatch)


@pytest.mark.parametrize("level", silence.LEVELS)
def test_levels(level: str) -> None:
    silence.test_twenty_updates_synchronise_nothing(level, "pageable", CPU)


def test_overflows_errors_of_data_and_resident_data() -> None:
    silence.test_an_overflow_is_skipped_without_a_read_and_halves_the_scale("require", "four", CPU)
    feeding.test_an_error_of_the_data_comes_after_all_updates_before_it("require", CPU)
    feeding.test_data_on_the_device_are_those_of_the_host_also_under_replay(shuffle=True, device=CPU)
