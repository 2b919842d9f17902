"""A signal to the process that called `launch` is passed on, and ends it when its processes have saved and ended."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from distributed.launched.programs_run import how_it_ends, read_lines, started

SECONDS = 60

WAITS = """
import os, signal, sys, time
from trainwright.distributed.launch import launch

def main():
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    os.write(1, b"waits\\n")
    while not signals:
        time.sleep(0.05)
    time.sleep(0.7)
    os.write(1, f"rank {os.environ['RANK']} saves after {len(signals)} signal\\n".encode())
    return bytes(2**22)  # more than a pipe holds

try:
    launch(main, processes=2)
finally:
    print("the end", flush=True)
"""

TRAINS = """
import os, sys, time, torch
from torch import nn
from trainwright import Checkpoint, Trainer, batches, launch

class Slow(Trainer):
    def after_update(self):
        if self.progress.updates == 3:
            os.write(1, b"trains\\n")
        time.sleep(0.05)

def main():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Slow(model, optimizer, nn.CrossEntropyLoss(), checkpoint=Checkpoint(sys.argv[1]), console=False)
    trainer.fit(batches((torch.randn(40, 4), torch.arange(40) % 2), 8), epochs=1000)

launch(main, processes=2)
"""


def test_sigterm_is_passed_on_once_and_ends_the_launcher_after_its_processes() -> None:
    with started([[sys.executable, "-c", WAITS]]) as [process]:
        assert read_lines(process, 2) == 2 * ["waits\n"]
        process.send_signal(signal.SIGTERM)
        end = how_it_ends(process, SECONDS)
    lines = end.out.splitlines()
    assert sorted(lines[:2]) == [f"rank {rank} saves after 1 signal" for rank in range(2)]
    assert lines[2:] == ["the end"]
    assert (end.code, end.err) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_training_that_was_launched_saves_when_its_launcher_is_signalled(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    with started([[sys.executable, "-c", TRAINS, str(tmp_path)]]) as [process]:
        assert set(read_lines(process, 2)) == {"trains\n"}
        process.send_signal(number)
        end = how_it_ends(process, SECONDS)
    assert end.code == 128 + number, end.err
    assert len(list(tmp_path.glob("update-*"))) == 1
    assert "Traceback" not in end.err
