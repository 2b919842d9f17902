"""Debugging tools on a GPU: the workspace of cuBLAS, no graph in anomaly mode, kernels in a profile, statistics."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Fast, ModelStatistics, Observer, Profile, Statistics, Trainer, Updates, anomaly, deterministic
from trainwright.tools.debug import WORKSPACE

pytestmark = pytest.mark.gpu

TOO_LATE = """
import torch
from trainwright import SettingError, deterministic
one = torch.ones(2, 2, device="cuda")
{before}
try:
    with deterministic():
        print((one @ one).sum().item())
except SettingError as error:
    print(error)
"""


class Told(Observer):
    def __init__(self) -> None:
        self.seen: list[ModelStatistics] = []

    def on_statistics(self, statistics: ModelStatistics) -> None:
        self.seen.append(statistics)


def fitted(device: torch.device, *observers: Any, graphs: Any = "auto", updates: int = 20) -> Trainer[Any]:
    """A convolutional network after some updates on batches of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    images, classes = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    trainer = Trainer(
        model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=device.type == "cuda"),
        nn.CrossEntropyLoss(),
        clip=0.1,
        device=device,
        console=False,
        observers=observers,
        fast=Fast(cuda_graphs=graphs if device.type == "cuda" else False),
    )
    trainer.fit((images, classes), max_updates=updates, batch_size=16)
    return trainer


def script(before: str) -> str:
    """What a process prints that enters `deterministic()` after the line `before`."""
    env = {name: value for name, value in os.environ.items() if name != WORKSPACE}
    lines = [sys.executable, "-c", TOO_LATE.format(before=before)]
    done = subprocess.run(lines, env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_a_workspace_is_set_before_the_first_product_and_refused_after_it() -> None:
    assert script("") == "8.0\n"
    assert "CUDA has multiplied matrices without CUBLAS_WORKSPACE_CONFIG" in script("one @ one")


def test_no_update_is_recorded_in_anomaly_mode(device: torch.device) -> None:
    with anomaly():
        trainer = fitted(device)
    assert "anomaly mode looks at every gradient" in trainer.fast_path


def test_deterministic_runs_repeat_themselves_and_record_without_a_clock(device: torch.device) -> None:
    with deterministic():
        runs = [fitted(device) for _ in range(2)]
        assert not torch.backends.cudnn.benchmark
    assert all("recorded" in trainer.fast_path for trainer in runs)
    states = [trainer.model.state_dict() for trainer in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_profile_holds_kernels_and_a_column_of_their_time(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_profile(device, tmp_path, capsys)


def check_profile(device: torch.device, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(directory, after=8, updates=4)
    fitted(device, profile, graphs=False)
    assert profile.path is not None
    trace = json.loads(gzip.decompress(profile.path.read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"]) == (device.type == "cuda")
    assert ("cuda ms" in capsys.readouterr().out) == (device.type == "cuda")


def test_statistics_of_recorded_updates_are_those_of_others(device: torch.device) -> None:
    with deterministic():
        check_statistics(device, "require")


def check_statistics(device: torch.device, graphs: Any) -> None:
    seen = []
    for each in (graphs, False):
        told = Told()
        fitted(device, Statistics(every=Updates(5)), told, graphs=each)
        seen.append(told.seen)
    assert [one.update for one in seen[0]] == [5, 10, 15, 20]
    for one, other in zip(*seen, strict=True):
        for name, found in one.parameters.items():
            assert found.grad_norm == pytest.approx(other.parameters[name].grad_norm, rel=1e-3)
            assert found.update_ratio == pytest.approx(other.parameters[name].update_ratio, rel=1e-3)
