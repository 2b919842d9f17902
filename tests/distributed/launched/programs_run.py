"""Start programs of several processes from a test: under torchrun, or one by one with their environment."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("programs.py")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    """How a process has ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port that nobody has, below those that outgoing connections are given."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):
                return port


def torchrun(*args: str, agents: int = 1, seconds: float = 60) -> list[Ended]:
    """Run torchrun with these arguments to its end; several agents, one process each, meet on loopback."""
    port = free_port()
    run = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    if agents == 1:
        return ended([[*run, "--nproc-per-node", "2", *args]], seconds=seconds)
    nodes = [[*run, "--nnodes", str(agents), "--nproc-per-node", "1", "--node-rank", str(n)] for n in range(agents)]
    return ended([[*node, *args] for node in nodes], seconds=seconds)


def by_environment(*args: str, seconds: float = 60) -> list[Ended]:
    """Run the program in two processes that have only the variables which say where they are."""
    with started_by_environment(*args) as processes:
        end = time.monotonic() + seconds
        return [how_it_ends(process, end - time.monotonic()) for process in processes]


@contextmanager
def started_by_environment(*args: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the program in two processes that have only the variables which say where they are."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands = [[sys.executable, str(PROGRAM), *args]] * 2
    with started(commands, [{**where, "RANK": str(rank)} for rank in range(2)]) as processes:
        yield processes


def ended(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = (), *, seconds: float
) -> list[Ended]:
    """Run commands at once; how each has ended, by order. Those that have not in time are an error."""
    with started(commands, environments) as processes:
        end = time.monotonic() + seconds
        return [how_it_ends(process, end - time.monotonic()) for process in processes]


def how_it_ends(process: subprocess.Popen[str], seconds: float) -> Ended:
    """Wait for the end of a process."""
    out, err = process.communicate(timeout=max(0.1, seconds))
    return Ended(process.returncode, "".join(filter(is_own, out.splitlines(keepends=True))), err)


def is_own(line: str) -> bool:
    """Whether a line is not of those that gloo of torch 2.8 prints where processes meet."""
    return "[Gloo] Rank" not in line and "connected peer ranks" not in line


def read_lines(process: subprocess.Popen[str], number: int) -> list[str]:
    """Wait for the next lines that a process prints."""
    assert process.stdout is not None
    lines = filter(is_own, iter(process.stdout.readline, ""))
    return [next(lines) for _ in range(number)]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start commands at once, each in a session of its own; nothing of them is left afterwards."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES and "SLURM" not in name}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = []
    try:
        for command, extra in zip(commands, environments or [{}] * len(commands), strict=True):
            processes.append(
                subprocess.Popen(
                    command,
                    env={**clean, **extra},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            end_session(process)


def end_session(process: subprocess.Popen[str]) -> None:
    """End a process and what it has started."""
    if process.poll() is None:
        process.terminate()  # torchrun ends its own: they are in sessions of their own
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
