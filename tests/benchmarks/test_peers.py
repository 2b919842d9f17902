"""The benchmarks beside loops by hand run; they find who trains otherwise and say who is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cold
import peers
import pytest
import torch
from contestants import tables
from contestants.entry import Contestant
from contestants.every import BY_NAME, CONTESTANTS
from contestants.loops import evaluation_plain, train_plain
from contestants.measuring import Times, evaluation_times, train_times
from contestants.tasks import WORKLOADS, Clock, Task, digits, task
from torch import nn

OWN = ",".join(one.name for one in CONTESTANTS if one.package is None)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches in the first workload."""
    inputs, targets = digits()
    few = replace(WORKLOADS["W1"], data=lambda: (inputs[:128], targets[:128]))
    monkeypatch.setitem(WORKLOADS, "W1", few)


@pytest.fixture
def small() -> Task:
    return task("W1", epochs=1)


def test_the_loops_by_hand_and_this_package_run_and_agree_in_both_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    order = ["--parts", "train,evaluate", "--workloads", "W1,W1f", "--contestants", OWN, "--rounds", "1"]
    assert peers.main([*order, "--epochs", "1", "--json", str(written)]) == 0
    printed, found = capsys.readouterr().out, json.loads(written.read_text())
    for name in OWN.split(","):
        assert f"| {name} | " in printed
        assert [len(found["train"][form][name]["thread"]) for form in ("W1", "W1f")] == [1, 1]
        assert found["train"]["W1"][name]["differs"] <= 1e-5
    assert "W1: trainwright-other / plain-other | 1.03" in printed
    assert set(found["evaluate"]["W1"]) == {one.name for one in CONTESTANTS if not one.package and one.evaluation}


def test_who_trains_otherwise_is_found(small: Task) -> None:
    def once_too_often(of: Task, clock: Clock) -> nn.Module:
        model = train_plain(of, clock)
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
        return model

    wrong = Contestant("wrong", once_too_often)
    found = train_times(small, [wrong], 1)
    assert not tables.agrees(wrong, found["wrong"])
    assert "**too much**" in tables.times(small, found, [wrong])


def test_who_draws_another_order_is_found(small: Task) -> None:
    known = BY_NAME["tuned"]
    assert tables.agrees(known, train_times(small, [known], 1)["tuned"])
    other = replace(known, order=Task.batches)
    assert not tables.agrees(other, train_times(small, [other], 1)["tuned"])


def test_who_evaluates_otherwise_is_found(small: Task) -> None:
    def without_its_last_digit(of: Task):
        exact = evaluation_plain(of)
        return lambda: round(exact(), 3)

    wrong = Contestant("wrong", None, without_its_last_digit)
    assert not tables.agrees(wrong, evaluation_times(small, [wrong], 1, passes=1)["wrong"])


def test_who_fails_is_reported_and_the_others_go_on(small: Task) -> None:
    def fail(of: Task, clock: Clock) -> nn.Module:
        raise RuntimeError("no such thing\nand more")

    contestants = [BY_NAME["plain"], replace(BY_NAME["tuned"], train=fail)]
    found = train_times(small, contestants, 1)
    assert "| tuned | failed: RuntimeError: no such thing |" in tables.times(small, found, contestants)
    assert found["plain"].thread
    assert not tables.sound({"W1": found})


def test_who_is_not_installed_is_listed() -> None:
    missing = replace(BY_NAME["ignite"], package="no-such-package")
    assert "| ignite | not installed | " in tables.field([missing])


def test_a_target_is_judged_by_the_median_of_ratios_within_rounds() -> None:
    times = {"trainwright": Times([2.0, 9.0, 3.0]), "tuned": Times([2.0, 10.0, 2.0])}
    assert "| W2: trainwright / tuned | 1.00 | 1.000 | 0.950 to 1.250 | met |" in tables.judged("train", {"W2": times})
    times["trainwright"] = Times([2.1, 9.0, 3.0])
    assert "| 1.050 | 0.975 to 1.275 | **missed** |" in tables.judged("train", {"W2": times})


def test_microseconds_over_the_tuned_loop_are_medians_of_differences_within_rounds_per_update() -> None:
    times = {"trainwright": Times([2e-6, 10e-6, 3e-6]), "tuned": Times([1e-6, 5e-6, 6e-6])}
    printed = tables.over_tuned({"W2": times, "W2f": times}, [BY_NAME["trainwright"]])
    assert "| us over tuned per update | W2 | quartiles | W2f | quartiles |" in printed
    assert "| trainwright | +1 | -1 to +3 | +4 | -4 to +12 |" in printed


def test_memory_of_a_child_process_is_measured() -> None:
    from contestants.measuring import memory

    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc")
    assert memory(task("W1", epochs=1), BY_NAME["plain"], what="peak")["peak"] > 50


def test_a_cold_start_has_its_figures() -> None:
    figures = cold.child("trainwright")
    assert list(figures) == list(cold.FIGURES)
    assert 0 < figures["first update"] < figures["first epoch"]
    assert figures["second epoch"] > 0
    table = cold.table(["trainwright"], {"import": [0.1], "contestants": {"trainwright": [figures]}}, {})
    assert "import trainwright over import torch: 0.100 CPU-s" in table
