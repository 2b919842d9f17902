"""Debugging tools on a GPU: the workspace of cuBLAS, anomaly mode, kernels in a profile."""

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

from trainwright import Trainer
from trainwright.observers import Profile
from trainwright.tools import anomaly, deterministic
from trainwright.tools.debug import WORKSPACE

pytestmark = pytest.mark.gpu

TOO_LATE = """
import torch
from trainwright import SettingError
from trainwright.tools import deterministic
one = torch.ones(2, 2, device="cuda")
{before}
try:
    with deterministic():
        print((one @ one).sum().item())
except SettingError as error:
    print(error)
"""


def fitted(device: torch.device, *observers: Any, updates: int = 20) -> Trainer[Any]:
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


def test_a_run_in_anomaly_mode_ends(device: torch.device) -> None:
    with anomaly():
        assert fitted(device).progress.updates == 20


def test_deterministic_runs_repeat_themselves(device: torch.device) -> None:
    with deterministic():
        runs = [fitted(device) for _ in range(2)]
        assert not torch.backends.cudnn.benchmark
    states = [trainer.model.state_dict() for trainer in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_profile_holds_kernels_and_a_column_of_their_time(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_profile(device, tmp_path, capsys)


def check_profile(device: torch.device, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(directory, after=8, updates=4)
    fitted(device, profile)
    assert profile.path is not None
    trace = json.loads(gzip.decompress(profile.path.read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"]) == (device.type == "cuda")
    assert ("Self CUDA" in capsys.readouterr().out) == (device.type == "cuda")
