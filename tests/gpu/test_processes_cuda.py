"""One process with a process group of NCCL: FSDP, DDP and sums give what they give without; in a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def run(kind: str, *more: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The program on this kind of device; it is ended where it takes longer."""
    here = Path(__file__).parent
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(here / "process_runs.py"), kind, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=alone, check=False)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="needs NCCL")
def test_one_process_with_a_group_is_one_without() -> None:
    done = run("cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all are the same" in done.stdout
