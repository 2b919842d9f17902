"""Processes that live long and share a process group, one pool per world size: only their start costs time."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Limits against hangs alone: a loaded machine may take ten times as long as an idle one, and no test fails for that.
RUN_SECONDS = 300
GROUP_SECONDS = 300  # after which a collective that a rank never joins is an error
START_SECONDS = 600
GRACE = 15  # after which the others of a rank that failed are ended too


class RankFailed(Exception):
    """What came out of one rank, with its traceback."""


class Pool:
    """`size` spawned processes that share a gloo group and wait for functions to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = RUN_SECONDS) -> list[Any]:
        """Run a function of a module, the same one on every rank, and return what each returned, by rank.

        An error of one rank is raised with its traceback. After `seconds` all ranks are ended; the next call
        starts new ones.
        """
        if not all(process.is_alive() for process in self._processes):  # another test has ended one
            self.close()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(seconds)

    def close(self) -> None:
        """End every process, whatever it does."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        port = self._answer_of_first()
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._answers(START_SECONDS)

    def _answer_of_first(self) -> Any:
        if not self._pipes[0].poll(START_SECONDS):
            self.close()
            raise TimeoutError("the first rank did not start")
        return self._pipes[0].recv()

    def _answers(self, seconds: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[waiting[pipe]] = self._received(waiting[pipe])
            if not all(done for done, _ in answers.values()):
                end = min(end, time.monotonic() + GRACE)
        return self._judged(answers, seconds)

    def _received(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return False, f"the process has ended with exit code {self._processes[rank].exitcode}"
        return answer

    def _judged(self, answers: dict[int, tuple[bool, Any]], seconds: float) -> list[Any]:
        silent = sorted(set(range(self.size)) - set(answers))
        if silent:
            self._show_stacks(silent)
        failed = {rank: text for rank, (done, text) in answers.items() if not done}
        if silent or any(not process.is_alive() for process in self._processes):
            self.close()
        if failed:
            texts = "\n".join(f"--- rank {rank} of {self.size}:\n{text}" for rank, text in failed.items())
            raise RankFailed(texts + (f"\n--- without an answer: ranks {silent}" if silent else ""))
        if silent:
            raise TimeoutError(f"ranks {silent} of {self.size} gave no answer for {seconds:g} s (stacks on stderr)")
        return [answers[rank][1] for rank in range(self.size)]

    def _show_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)


_POOLS: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """Return the pool of `size` processes, the same one for the whole session."""
    if size not in _POOLS:
        _POOLS[size] = Pool(size)
    return _POOLS[size]


def await_path(path: Path, *, seconds: float) -> bool:
    """Wait until a path exists; False where it does not come within the limit."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@atexit.register
def close_pools() -> None:
    """End the processes of every pool."""
    for each in _POOLS.values():
        each.close()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    """Live in a process of the pool: join the group, then run what comes until the pipe ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _join_group(pipe, rank, size)
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # what cannot be unpickled here is an answer too
            pipe.send((False, traceback.format_exc()))
            continue
        pipe.send(_answer(function, args))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join_group(pipe: Connection, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    limit = timedelta(seconds=GROUP_SECONDS)
    if rank == 0:  # a port that is free because the store itself has chosen it
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=limit)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    import pickle

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings(
                "ignore", "Guards may run slower on Python 3.13.0"
            )  # torch's own, as pyproject.toml
            value = function(*args)
        pickle.dumps(value)  # an answer that cannot be sent is an error of the function, not of the pipe
    except BaseException:
        return False, traceback.format_exc()
    return True, value
