"""The GPU benchmarks run dry on a CPU; they judge by medians, find who trains otherwise, and say who is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import cases, report, tasks
from gpu_cases.entry import Bench, Case, Clock, Contestant, Runs, Task, ratio
from gpu_cases.loops import GRAPH, TUNED, train_tuned
from gpu_cases.measuring import Rounds
from torch import nn

import gpu

DRY = ["--tiny", "--device", "cpu", "--rounds", "1", "--without-peers"]
BENCH = Bench(torch.device("cpu"), tiny=True, rounds=1)
ON_GPU = Bench(torch.device("cuda", 0), tiny=False, rounds=1)
TARGETS = {
    "B1": ["trainwright / tuned | <= 1.05", "tuned / graph | >= 3"],
    "B2": ["trainwright / tuned | <= 1.01"],
    "B3": ["trainwright / tuned | <= 1.01"],
    "B4": [
        "trainwright / tuned | <= 1.01",
        "trainwright-compile / compile | <= 1.01",
        "MFU of trainwright-compile | >= 0.45",
    ],
    "B5": ["trainwright / tuned | <= 1.05", "tuned / graph | >= 3"],
    "B6": ["tuned-padded / trainwright | >= 1.5", "graphs compiled by trainwright-compile | <= 4"],
    "B7": ["trainwright / resident | <= 1.01"],
    "B8": ["update of trainwright / of tuned | <= 0.8", "trainwright / tuned | <= 1.01"],
    "B9": ["trainwright / fastest peer | <= 1", "fastest peer / trainwright | >= 3", "lightning / trainwright | >= 8"],
}


@pytest.fixture
def small() -> Task:
    return tasks.perceptron(BENCH)


def run(task: Task, contestants: Sequence[Contestant]) -> dict[str, Runs]:
    return Rounds(Case("B1", lambda _: task, contestants, lambda _: []), task).run()


@pytest.mark.parametrize("name", TARGETS)
def test_a_case_runs_dry_with_equal_weights_and_its_targets_beside_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    assert gpu.main([*DRY, "--only", name, "--json", str(written)]) == 0
    printed, found = capsys.readouterr().out, json.loads(written.read_text())
    assert "its times say nothing" in printed
    assert "| met |" not in printed and "missed" not in printed
    for target in TARGETS[name]:
        assert f"| {target} | " in printed
    for case in found[name]:
        ran = {one: runs for one, runs in case["contestants"].items() if not runs["absent"]}
        compared = [runs["differs"] for one, runs in ran.items() if one.startswith("trainwright") and runs["differs"]]
        assert "trainwright" in ran and max(compared, default=0.0) <= tasks.ON_CPU
        assert ran["trainwright"]["differs"] is not None
        assert all(len(runs["seconds"]) == 1 for runs in ran.values())


def test_the_ceilings_run_dry(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*DRY, "--only", "B0"]) == 0
    printed = capsys.readouterr().out
    assert "| bf16 matrix product, 64 cubed | " in printed
    assert "| a node of a graph of 1000 | not on cpu | " in printed


def test_every_case_has_its_targets_here() -> None:
    assert ("B0", *TARGETS) == cases.NAMES


def test_who_needs_a_gpu_or_is_not_installed_is_reported(small: Task) -> None:
    contestants = (TUNED, GRAPH, replace(TUNED, name="other", package="no-such-package"))
    case = Case("B1", lambda _: small, contestants, lambda _: [])
    table = report.table(case, small, run(small, contestants))
    assert "| graph | left out: not on cpu |" in table
    assert "| other | left out: no-such-package is not installed |" in table


def test_who_trains_otherwise_is_found(small: Task) -> None:
    def once_too_often(task: Task, clock: Clock) -> nn.Module:
        model = train_tuned(task, clock)
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
        return model

    found = run(small, [TUNED, Contestant("wrong", once_too_often)])
    assert not report.agrees(small, found["wrong"])
    assert not report.sound(small, found)
    assert report.agrees(small, found["tuned"])


def test_weights_that_are_not_numbers_agree_with_nothing(small: Task) -> None:
    def broken(task: Task, clock: Clock) -> nn.Module:
        model = train_tuned(task, clock)
        with torch.no_grad():
            next(model.parameters())[0] = torch.nan
        return model

    assert not report.agrees(small, run(small, [TUNED, Contestant("broken", broken)])["broken"])


def test_who_fails_or_ends_too_few_epochs_is_reported_and_the_others_go_on(small: Task) -> None:
    def fail(task: Task, clock: Clock) -> nn.Module:
        raise RuntimeError("no such thing\nand more")

    def too_short(task: Task, clock: Clock) -> nn.Module:
        return train_tuned(replace(task, epochs=0), clock)

    contestants = [TUNED, Contestant("failing", fail), Contestant("short", too_short)]
    found = run(small, contestants)
    table = report.table(Case("B1", lambda _: small, contestants, lambda _: []), small, found)
    assert "| failing | failed: RuntimeError: no such thing and more |" in table
    assert found["short"].failed == "RuntimeError: 1 epochs ended, not 2"
    assert found["tuned"].seconds
    assert not report.sound(small, found)


@pytest.mark.parametrize(
    ("own", "bound", "word"),
    [
        ([2.0, 9.0, 3.0], {"at_most": 1.0}, "met"),
        ([2.1, 9.0, 3.0], {"at_most": 1.0}, "**missed**"),
        ([8.0, 9.0, 6.0], {"at_least": 3.0}, "met"),
        ([8.0, 9.0, 5.8], {"at_least": 3.0}, "**missed**"),
    ],
)
def test_a_target_is_judged_by_the_median_of_ratios_within_rounds(
    small: Task, own: list[float], bound: dict[str, Any], word: str
) -> None:
    found = {"a": Runs(seconds=own), "b": Runs(seconds=[2.0, 10.0, 2.0])}
    target = ratio("a", "b", **bound)
    assert report.judged(replace(small, bench=ON_GPU), found, [target])[0]["word"] == word
    assert report.judged(small, found, [target])[0]["word"] == report.NO_CLAIM


def test_the_update_alone_is_what_it_takes_over_forward_and_backward() -> None:
    found = {"tuned": Runs(seconds=[3.0]), "gradients": Runs(seconds=[1.0]), "trainwright": Runs(seconds=[2.5])}
    assert cases.folded(tasks.perceptron(BENCH))[0].values(found) == [0.75]


def test_the_fastest_peer_is_the_one_with_the_least_median() -> None:
    found = {
        "tuned": Runs(seconds=[1.0, 1.0, 1.0]),
        "trainwright": Runs(seconds=[2.0, 2.0, 2.0]),
        "lightning": Runs(seconds=[1.0, 16.0, 16.0]),
        "accelerate": Runs(seconds=[8.0, 8.0, 8.0]),
        "hf-trainer": Runs(failed="no"),
    }
    beside, faster, lightning = cases.beside_peers(3.0, lightning=8.0)(tasks.perceptron(BENCH))
    assert beside.values(found) == [0.25] * 3
    assert faster.values(found) == [4.0] * 3
    assert lightning.values(found) == [0.5, 8.0, 8.0]


def test_a_cpu_is_for_dry_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "--device cpu is a dry run" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert not said.out and "no CUDA device is here" in said.err


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["B1", "B5"])
def test_the_launch_bound_cases_run_on_cuda(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny", "--rounds", "1", "--only", name, "--without-peers"]) == 0
    assert "a graph of the whole update, 5 replays" in capsys.readouterr().out
