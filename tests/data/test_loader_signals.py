"""A signal to the whole process group leaves the workers to the main process, which may still want their batches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sources import Noisy
from torch.utils.data import DataLoader

from trainwright.data.opening import batches, open_source

PROMPT = 60.0
"""Seconds that a loaded machine has for what an idle one does at once."""
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Slow(Noisy):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.tensor(index)


def survive(kind: str) -> None:
    """Send the signals to the own group while workers are at work; the rest of the batches come."""
    persistent = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
    source = open_source(persistent if kind == "loader" else batches(Slow(), 2, workers=2))
    iterator = source.epoch(0)
    for number in NUMBERS:
        next(iterator)
        os.killpg(0, number)
    print(sum(1 for _ in iterator), flush=True)
    if kind != "loader":
        return
    iterator = source.epoch(1)
    held = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the fetch tells it, not the sleep
    try:
        for _ in range(4):
            next(iterator)
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.3)
    except RuntimeError as error:
        print("signal: Terminated" in f"{error}{error.__cause__}", error.__notes__[0].splitlines()[0], flush=True)
    signal.signal(signal.SIGCHLD, held)


def starts() -> None:
    """A signal that comes while workers are being started finds them ready for it, not with the handler of `fit`."""
    main = os.getpid()
    for number in NUMBERS:
        signal.signal(number, lambda *_: None if os.getpid() == main else os._exit(5))
    sender = os.fork()
    if sender == 0:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
        while os.getppid() != 1:
            for number in NUMBERS[1:]:
                os.killpg(0, number)
            time.sleep(0.002)
        os._exit(0)
    for _ in range(4):
        assert len(list(open_source(DataLoader(Slow(), batch_size=10, num_workers=2)).epoch(0))) == 2
    os.kill(sender, signal.SIGKILL)
    os.waitpid(sender, 0)
    print("started", flush=True)


def waits() -> None:
    """Tell who the workers are, and wait to be killed."""
    loader = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
    list(open_source(loader).epoch(0))
    print(*[process.pid for process in loader._iterator._workers], flush=True)
    time.sleep(600)


def ends() -> None:
    """Run everything, and leave persistent workers under way at the end."""
    for number in NUMBERS:
        signal.signal(number, lambda *_: None)
    survive("loader")
    survive("batches")
    starts()
    kept = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = open_source(kept).epoch(0)
    next(iterator)
    # torch waits so long for a worker that does not end: far longer than a loaded machine takes for one that does
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 2 * PROMPT
    vars(sys.modules["__main__"]).update(kept=kept, iterator=iterator)
    print(time.time(), flush=True)


@contextmanager
def script(name: str) -> Iterator[Any]:
    command = [sys.executable, __file__, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process


@pytest.mark.slow
def test_workers_survive_a_signal_to_their_group_once_and_end_with_their_process() -> None:
    with script("ends") as process:
        reported = process.stdout.read().splitlines()
        assert process.wait(timeout=3 * PROMPT) == 0
        assert reported[0] == reported[2] == "7", reported
        # The same workers have seen one SIGTERM before.
        assert reported[1].startswith("True trainwright: loader worker "), reported
        assert reported[3] == "started"
        assert time.time() - float(reported[4]) < PROMPT


@pytest.mark.slow
def test_workers_end_with_a_killed_parent() -> None:
    with script("waits") as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    deadline = time.monotonic() + PROMPT  # torch's workers look for their parent every 5 s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"ends": ends, "waits": waits}[sys.argv[1]]()
