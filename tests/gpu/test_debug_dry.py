"""What the tests of the debugging tools on a GPU do, tried on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_debug_cuda as debug
import torch

from trainwright.tools import deterministic

CPU = torch.device("cpu")


def test_runs_repeat_themselves() -> None:
    with deterministic():
        first, second = (debug.fitted(CPU).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debug.check_profile(CPU, tmp_path, capsys)
