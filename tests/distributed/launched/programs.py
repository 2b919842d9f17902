"""A program of several processes, as a user starts it: `python -m torch.distributed.run programs.py total`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright import DDP
from trainwright.distributed.start import as_world
from trainwright.distributed.world import World


def say(*words: object) -> None:
    """Print a line in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def total(world: World) -> float:
    """Add the ranks + 1 of all processes up; a second trainer's world is the same group."""
    [summed] = as_world("auto").sum_numbers(world.rank + 1)
    say("rank", world.rank, "local", world.local_rank, "of", world.size, "sum", summed)
    return summed


def updates(world: World, do: str, *, on: int = 1) -> None:
    """Run updates, each with a collective, as a fit does; in the third, one rank does something else."""
    update = 0
    with world.watch(lambda: f"update {update}"):
        for update in range(6):
            if update == 3 and world.rank == on:
                time.sleep(1.2)  # so that the others have read a heartbeat of it from there
                DEEDS[do]()
            world.sum_numbers(0)


def fail() -> None:
    raise ValueError("bad row 17\nmore of it")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(100)


DEEDS = {"fail": fail, "stop": stop, "kill": kill, "sleep": sleep}


def main(kind: str, *, timeout: float = 60.0, on: int = 1) -> float | None:
    """Find the other ranks and run `kind`; return the result of `total`."""
    torch.set_num_threads(1)
    world = as_world(DDP(timeout=timeout))
    if kind == "total":
        return total(world)
    return updates(world, kind, on=on)


def in_group(kind: str, **settings: float) -> None:
    """The same in a group that somebody else has made, whose own time-out is long."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    main(kind, **settings)
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert not threads_of("gloo"), threads_of("gloo")  # a group that somebody still holds keeps them
    say("taken down by its owner")


def threads_of(name: str) -> list[str]:
    """Return the names of this process's threads, C++ ones included, that have this in them; none but on Linux."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [thread for thread in names if name in thread]


if __name__ == "__main__":
    _, kind, *rest = sys.argv
    settings = {name: float(value) for name, value in (word.split("=") for word in rest)}
    if kind.startswith("group-"):
        in_group(kind.removeprefix("group-"), **settings)
    else:
        main(kind, **settings)
