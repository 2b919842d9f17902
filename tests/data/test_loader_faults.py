"""A killed, raising or hanging worker ends the pass with an error that names the worker, its rows and what to do."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from traceback import clear_frames
from typing import Any

import pytest
import torch
from sources import Noisy
from torch.utils.data import DataLoader, _utils, get_worker_info

from trainwright.data.dataloader import workers
from trainwright.data.opening import batches, open_source


class Faulty(Noisy):
    """Rows one of which does something else."""

    def __init__(self, fault: Callable[[], Any], row: int = 9) -> None:
        self.fault = fault
        self.row = row

    def __getitem__(self, index: int) -> Any:
        if index == self.row and get_worker_info() is not None:
            time.sleep(0.5)  # the other worker has started too: the main process fetches
            self.fault()
        return torch.tensor(index)


def kills_itself(number: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), number)


def raises() -> None:
    raise KeyError("a label that is not there")


def is_full() -> None:
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")


def note(call: Callable[[], Any], error: type[Exception] = RuntimeError) -> str:
    with pytest.raises(error) as caught:
        call()
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    with suppress(RuntimeError):  # the iterator ends with the traceback that holds it, and torch may raise once more
        clear_frames(caught.tb)
        del caught
        gc.collect()
    return said


ROWS = r"\n  rows     (0, 1, 2, 3; then )?8, 9, 10, 11(; then 16, 17, 18, 19)?\n"
"""Row 9 fails; what the worker gave before may be on its way, and it was asked for more."""


def passed(fault: Callable[[], Any], **settings: Any) -> Callable[[], Any]:
    loader = DataLoader(Faulty(fault), batch_size=4, num_workers=2, **settings)
    return lambda: list(open_source(loader).epoch(0))


def test_a_killed_worker_is_named_with_its_rows() -> None:
    said = note(passed(kills_itself(signal.SIGKILL)))
    assert "loader worker 0 of 2 (pid " in said
    assert re.search(f"was killed{ROWS}  why      SIGKILL", said)
    assert "fix      fewer num_workers" in said


def test_shared_memory_that_is_too_small_is_named_with_the_room_that_is_left() -> None:
    for fault in (kills_itself(signal.SIGBUS), is_full):
        said = note(passed(fault))
        assert re.search(f"ran out of shared memory{ROWS}  why      batches go to this process through", said)
        assert "docker run --shm-size=8g" in said


def test_an_error_of_the_data_set_keeps_its_type_and_gets_worker_and_rows() -> None:
    said = note(passed(raises), KeyError)
    assert "a label that is not there" in said
    assert "loader worker 0 of 2 (pid " in said
    assert "raised this error\n  rows     8, 9, 10, 11\n  fix      num_workers=0" in said


def test_a_worker_that_ends_by_itself_is_named() -> None:
    assert re.search(f"died{ROWS}", note(passed(lambda: os._exit(3))))


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_a_worker_that_hangs_ends_the_pass_in_the_end(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "HANGS_AFTER", 5.0)  # torch looks every 5 s
    begun = time.monotonic()
    said = note(passed(lambda: time.sleep(60), **({"timeout": 1} if own else {})))
    assert f"DataLoader timed out after {1 if own else 5} seconds" in said
    assert "loader worker 0 of 2 (pid " in said
    assert re.search(f"gave no batch in time{ROWS}  why      it hangs", said)
    assert "DataLoader(timeout=...)" in said
    assert time.monotonic() - begun < 30


def test_the_rows_of_batches_are_named_too() -> None:
    said = note(lambda: list(batches(Faulty(raises), 4, seed=1, workers=2)), KeyError)
    assert "raised this error\n  rows     8, 9, 10, 11" in said


@pytest.mark.parametrize("persistent", [False, True])
def test_a_death_that_nobody_noticed_is_reported_by_the_next_fetch(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 60.0)  # torch itself looks that late
    loader = DataLoader(Faulty(raises, row=-1), batch_size=2, num_workers=2, persistent_workers=persistent)
    iterator = open_source(loader).epoch(0)
    next(iterator)
    [alive] = [one for one in workers._POOLS if one._dataset is loader.dataset]
    held = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.kill(alive._workers[1].pid, signal.SIGKILL)
        time.sleep(0.3)
        begun = time.monotonic()
        assert "loader worker 1 of 2 (pid " in note(lambda: next(iterator))
        assert time.monotonic() - begun < 40
    finally:
        signal.signal(signal.SIGCHLD, held)
