"""The tests on a GPU, tried on the CPU: each of their helpers and cases runs for a few updates."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import test_fast_cuda as fast
import test_feeding_cuda as feeding
import test_processes_cuda as processes
import test_runs_cuda as runs_cuda
import test_same_cuda as same_cuda
import test_silence_cuda as silence
import torch
from gpu_runs import (
    Case,
    by_hand,
    cases,
    data_of,
    distance,
    fitted,
    host_batches,
    make,
    same,
    state_of,
    trained,
    watch_of,
)
from steady import ALLOCATES, LAUNCHES, WAITS, blocked, calls_in, counting_memory, matching, no_sync, profiled, steady
from torch import nn

from trainwright import Checkpoint, Trainer, Updates, accuracy
from trainwright.update import deferred_check

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = [kind for kind in silence.DATA if kind != "pinned"]
FEEDS = [feed for feed in feeding.FEEDS if feed != "pinned"]


def test_every_case_has_the_weights_of_the_loop_by_hand() -> None:
    for case in cases():
        same_cuda.check_three(case, same_cuda.three_ways(case, CPU, updates=2))


@pytest.mark.parametrize(
    "case",
    [Case("adamw", 0.25, "ragged", None, "step"), Case("sgd", None, "four", "bf16", "one cycle"),
     Case("adamw", 0.25, "one", "fp16", "one cycle"), Case("sgd", 0.25, "ragged", "bf16", "cycled"),
     Case("adamw", None, "one", "fp16", "cycled")],
    ids=str,
)  # fmt: skip
def test_a_deferred_check_is_an_immediate_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_check, "ASYNC_DEVICES", {"cpu"})
    same_cuda.test_a_deferred_check_is_an_immediate_one_is_the_loop_by_hand(case, CPU)


def test_evaluations_noise_and_changes_between_updates_that_are_checked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_check, "ASYNC_DEVICES", {"cpu"})
    same_cuda.test_dropout_and_batchnorm_advance_as_in_the_loop_by_hand("rows", "four", None, CPU)
    same_cuda.test_evaluations_between_updates_see_the_weights_of_their_time("metrics", CPU)
    same_cuda.test_what_a_step_logs_is_in_the_record_of_its_update(CPU)
    same_cuda.test_what_is_changed_between_epochs_reaches_the_updates_after("adamw", CPU)


@pytest.mark.parametrize(
    "case", [Case("adamw", 0.25, "ragged", "fp16", "one cycle"), Case("sgd", None, "four")], ids=str
)
def test_all_updates_of_a_case_are_those_by_hand(case: Case) -> None:
    assert distance(by_hand(case, CPU), trained(case, CPU).model) <= 1e-5


@pytest.mark.parametrize(
    "other",
    [Case("sgd", 0.25, "four", None, "step"), Case("adamw", None, "four", None, "step"),
     Case("adamw", 0.25, "one", None, "step"), Case("adamw", 0.25, "four", "bf16", "step"),
     Case("adamw", 0.25, "four", None, "one cycle"), Case("adamw", 0.25, "four", None, "cycled"),
     Case("adamw", 0.25, "ragged", None, "step")],
    ids=str,
)  # fmt: skip
def test_what_is_varied_is_seen_in_the_weights(other: Case) -> None:
    one = by_hand(Case("adamw", 0.25, "four", None, "step"), CPU, updates=20)
    assert distance(one, by_hand(other, CPU, updates=20)) > 5e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", silence.LEVELS)
def test_steady_updates_are_looked_at(level: str, kind: str) -> None:
    trainer = silence.run_of(level, CPU, metrics={"accuracy": accuracy})
    steady(trainer, silence.data_for(level, kind, updates=3), partial(no_sync, CPU), updates=3, first=1)
    assert len(watch_of(trainer).records) == 3


def test_what_is_counted_is_counted_between_two_updates(tmp_path: Any) -> None:
    calls, changes = Counter[str](), dict[str, int]()
    data = silence.data_for("L1", "pageable", updates=3)
    steady(silence.run_of("L1", CPU), data, partial(profiled, CPU, tmp_path / "trace.json", calls), updates=3, first=1)
    steady(silence.run_of("L1", CPU), data, partial(counting_memory, CPU, changes), updates=3, first=1)
    assert not calls
    assert not changes
    came = blocked(silence.run_of("L1", CPU, accumulate=1), data, CPU, updates=3)
    assert len(came) == 1


def test_calls_are_counted_between_the_marks_and_in_the_threads_that_compute() -> None:
    def event(name: str, ts: float, *, tid: int = 1, cat: str = "cuda_runtime") -> dict[str, Any]:
        return {"name": name, "ts": ts, "tid": tid, "cat": cat}

    events = [
        event("cudaDeviceSynchronize", 0.0),
        event("steady begins", 1.0, cat="user_annotation"),
        event("aten::mm", 2.0, tid=2, cat="cpu_op"),
        event("cudaLaunchKernel", 3.0, tid=2),
        event("cudaStreamSynchronize", 4.0),
        event("cudaMalloc", 5.0, tid=2),
        event("cudaHostAlloc", 6.0, tid=3),
        event("steady ends", 8.0, cat="user_annotation"),
        event("cudaDeviceSynchronize", 9.0),
        {"name": "process_name", "ph": "M"},
    ]
    calls = calls_in(events)
    assert matching(calls, WAITS) == {"cudaStreamSynchronize": 1}
    assert matching(calls, ALLOCATES) == {"cudaMalloc": 1}
    assert matching(calls, LAUNCHES) == {"cudaLaunchKernel": 1}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("micro_batches", ["one", "four"])
def test_overflows_are_those_of_torchs_scale(micro_batches: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr(deferred_check, "ASYNC_DEVICES", {"cpu"})
    trainer, data, model, scales = silence.overflowing(CPU, micro_batches=micro_batches)
    fitted(trainer, data, updates=1000, epochs=1)
    silence.check_overflows(trainer, model, scales)
    assert any(record.skipped for record in watch_of(trainer).records[silence.WARM :])


@pytest.mark.parametrize("kind", [silence.Reads, silence.Copies, silence.Allocates])
def test_faults_run(kind: Any) -> None:
    fitted(silence.run_of("L1", CPU, kind=kind), silence.data_for("L1", "pageable", updates=2), updates=2)


@pytest.mark.parametrize("kind", same_cuda.NOISY)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_noise_and_counters(kind: str, precision: str | None) -> None:
    case = Case("adamw", 0.25, "four", precision, "step")
    noises, counted = same_cuda.noises_of(case, kind, CPU, updates=4)
    assert all(torch.equal(noise, noises[0]) for noise in noises)
    assert counted == [[16, 16]] * 2


@pytest.mark.parametrize("slots", same_cuda.SLOTS)
def test_evaluations(slots: str) -> None:
    at_once, later = same_cuda.evaluated(slots, CPU, updates=15)
    assert len(at_once.history) >= 3
    assert at_once.history == later.history


def test_what_changes_and_what_is_logged() -> None:
    case = Case("adamw", 0.25, "one", None, "step")
    assert distance(trained(case, CPU).model, trained(case, CPU, kind=same_cuda.Changes).model) > 1e-3
    assert "spread" in watch_of(trained(case, CPU, kind=same_cuda.Own, updates=2)).records[-1].values


def test_runs_that_end_early_and_take_turns(tmp_path: Any) -> None:
    runs_cuda.test_two_trainers_take_turns(CPU)
    assert runs_cuda.interrupted(CPU, at=2).progress.updates in (2, 3)
    runs_cuda.check_resumed(*runs_cuda.resumed(CPU, tmp_path, cut=5, updates=8))
    trained(runs_cuda.CASE, CPU, updates=4, checkpoint=Checkpoint(tmp_path / "run", every=Updates(2)))
    runs_cuda.check_saved(CPU, tmp_path / "run", updates=(2, 4))


def test_a_worker_feeds() -> None:
    trained(runs_cuda.CASE, CPU, data=runs_cuda.with_workers(CPU, 2), updates=2)


@pytest.mark.parametrize("kind", fast.LATE)
def test_late_errors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(deferred_check, "ASYNC_DEVICES", {"cpu"})
        late, said_late = fast.refused(fast.LATE[kind], CPU, 6, build=fast.noisy_net)
    at_once, said = fast.refused(fast.LATE[kind], CPU, 6, build=fast.noisy_net)
    assert said == said_late
    assert f"update {6 // fast.LATE[kind].micro_batches + 1}" in said
    assert [int(norm.num_batches_tracked) for norm in fast.norms(late)] == [late.progress.batch] * 2
    assert distance(late.model, at_once.model) <= 1e-5


@pytest.mark.parametrize("form", fast.FORMS)
def test_direct_steps(form: str) -> None:
    assert same(fast.stepped(form, CPU, direct=True, steps=3), fast.stepped(form, CPU, direct=False, steps=3))
    if form != "maximize":
        ours = fast.stepped(form, CPU, direct=True, held_back=1, steps=3)
        for one, other in zip(ours, fast.stepped(form, CPU, direct=False, held_back=1, steps=3), strict=True):
            torch.testing.assert_close(one, other)


def test_precisions_memory_and_compiled_runs() -> None:
    assert not fast.native(CPU)
    exact, before = fast.products(CPU, None)
    assert torch.equal(exact, fast.products(CPU, "tf32")[0])
    assert before == torch.get_float32_matmul_precision()
    assert trained(Case(), CPU, precision="auto", updates=2).precision is None
    for kind in ("host", "device"):
        assert fast.held_at((1, 2), CPU, kind=kind) == []
    there, here, _ = fast.copied(CPU)
    assert all(torch.equal(one, here[name]) for name, one in there.items())
    eager, compiled = fast.compiled_too("aot_eager", CPU, updates=4)
    assert distance(eager.model, compiled.model) <= 1e-6


def test_the_meter() -> None:
    speeds, _ = fast.measured(CPU, width=16, size=8, updates=4)
    assert sum(one.updates for one in speeds) == 4
    assert speeds[-1].flops_per_row in (None, (6 * 4 - 2) * 16**2)


@pytest.mark.parametrize("feed", FEEDS)
def test_feeds(feed: str) -> None:
    # As long as no copy is made, memory that is written to again shows where a batch is kept.
    kept = feed not in ("a worker", "refilled")
    kinds = (feeding.SlowPlain, feeding.Slow) if kept else (feeding.Waits, feeding.Waits)
    wanted, ours = (
        feeding.fed(one, CPU, kind=kind, updates=3) for one, kind in zip(("pageable", feed), kinds, strict=True)
    )
    assert same(state_of(wanted), state_of(ours))
    counts = feeding.Counts(CPU, 1, 3)
    feeding.fed(feed, CPU, kind=feeding.Waits, updates=3, observers=[counts])
    assert counts.found == [{}, {}]


def test_data_that_fail_and_data_that_reside() -> None:
    assert [record.update for record in watch_of(feeding.broken(CPU)).records] == list(range(1, 13))
    for shuffle in (False, True):
        runs = feeding.residing(CPU, shuffle=shuffle, updates=3)
        assert same(state_of(runs[0]), state_of(runs[1]))


def test_one_process_with_a_group() -> None:
    done = processes.run("cpu", "2", seconds=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all are the same" in done.stdout


def test_cases_and_a_trainer_of_ones_own() -> None:
    assert len(list(cases())) == 108
    assert len({str(case) for case in cases()}) == 108
    assert len(data_of(Case(accumulate="ragged"))[-1][0]) == 7
    trainer = make(Case(), CPU, kind=Trainer)
    assert isinstance(fitted(trainer, host_batches(2), updates=2).model, nn.Module)
