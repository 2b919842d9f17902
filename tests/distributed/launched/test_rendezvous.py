"""A rank that waits for the others to start reports it once, with the missing ranks, the address and the variables."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distributed.launched.programs_run import free_port
from trainwright import DDP
from trainwright.distributed import environment
from trainwright.distributed.launch import launch
from trainwright.distributed.start import as_world

SECONDS = 40


def come(late: int, port: int | None, log: str) -> None:
    """Have rank `late` come only when another one has reported that it waits."""
    if port is not None:  # the store is the first process's own, as where no launcher has one
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
    file = Path(log)
    if os.environ["RANK"] == str(late):
        end = time.monotonic() + 15
        while "waits" not in file.read_text() and time.monotonic() < end:
            time.sleep(0.05)
    else:
        environment.REPORT_AFTER = 0.3
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), 2)
    as_world(DDP(timeout=20)).sum_numbers(0)


@pytest.mark.parametrize("own_store", [False, True], ids=["a launcher's store", "the first one's store"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_long_wait_is_reported_once_with_the_missing_ranks_and_the_address(
    late: int, own_store: bool, tmp_path: Path
) -> None:
    log, port = tmp_path / "stderr", free_port() if own_store else None
    log.touch()
    launch(lambda: come(late, port, str(log)), processes=2, timeout=SECONDS)
    [line] = [line for line in log.read_text().splitlines() if "waits" in line]
    assert line.startswith(f"rank {1 - late} waits at 127.0.0.1:{'' if port is None else port}")
    come_so_far = "1 of 2 processes have joined; missing: rank 1" if late else "rank 0 of 2 processes does not answer"
    assert come_so_far in line
    assert f"RANK={1 - late}, WORLD_SIZE=2, LOCAL_RANK={1 - late}, MASTER_ADDR=127.0.0.1, MASTER_PORT=" in line
