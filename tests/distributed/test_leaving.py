"""The process group that a Trainer has made is destroyed at exit, where Python 3.12 and later start no thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, threading, torch
from torch import nn
from trainwright import FSDP, Trainer

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

atexit.register(lambda: print("group at the end:", torch.distributed.is_initialized()))
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
trainer = Trainer(model, torch.optim.SGD, nn.MSELoss(), parallel=FSDP({nn.ReLU}), device="cpu", console=False)
trainer.fit((torch.randn(8, 4), torch.randn(8, 2)), epochs=1, batch_size=4)
print("group after fit:", torch.distributed.is_initialized())
atexit.register(setattr, threading.Thread, "start", refuse)  # the first to be called: every Python is as 3.12
"""


@pytest.mark.slow
def test_the_group_is_destroyed_at_exit_without_a_new_thread(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("group ")]  # gloo of torch 2.8 prints one too
    assert lines == ["group after fit: True", "group at the end: False"], done.stderr
    assert done.returncode == 0
