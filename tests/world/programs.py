"""A program of several processes, as a user starts it: `python -m torch.distributed.run programs.py KIND`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from trainwright.parallel.start import as_world
from trainwright.parallel.world import World


class Settings:
    """What the `parallel` setting needs to have."""

    backend = None

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout


def say(*words: object) -> None:
    """Print a line in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def total(world: World) -> None:
    """Every process adds its rank + 1."""
    ours = as_world("auto") if world.size > 1 else world
    say("rank", world.rank, "local", world.local_rank, "of", world.size, "sum", *world.total(world.rank + 1))
    assert ours.host is world.host


def watched(world: World, do) -> None:
    """Run updates, each with a collective, as a fit does; rank 1 comes to `do` in the third."""
    update = 0
    with world.watched(lambda: f"update {update}"):
        for update in range(6):
            if update == 3 and world.rank == 1:
                do()
            world.wait()


def fail() -> None:
    raise ValueError("bad row 17\nmore of it")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(100)


def main(kind: str, timeout: float = 60.0) -> None:
    """Find the others and do what `kind` says."""
    torch.set_num_threads(1)
    if kind == "initialised":
        dist.init_process_group("gloo")
        kind = "total"
    world = as_world(Settings(timeout))
    if kind == "total":
        total(world)
    else:
        watched(world, {"fail": fail, "stop": stop, "kill": kill, "sleep": sleep}[kind])


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
