"""What a process says that waits for others in vain: in which call of the user's, for whom, and what to write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import DDP, DistributedError, Trainer, batches
from trainwright.core.progress import Counters
from trainwright.distributed import peer_errors
from trainwright.distributed.launcher import launch
from trainwright.distributed.peer_errors import told
from trainwright.update.per_rank_state import position_text

HERE = Path(__file__)
CALLS: dict[str, Callable[[Trainer[Any], Any], Any]] = {
    "evaluate": lambda trainer, data: trainer.evaluate(data),
    "predict": lambda trainer, data: trainer.predict(data),
    "report": lambda trainer, data: trainer.report(data),
    "fit": lambda trainer, data: trainer.fit(data, epochs=1),
}


def trained(timeout: float) -> tuple[Trainer[Any], Any]:
    torch.manual_seed(0)
    data = batches((torch.randn(16, 4), torch.arange(16) % 2), 8)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), parallel=DDP(timeout=timeout), console=False)
    trainer.fit(data, epochs=1)
    return trainer, data


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if text in line)


def on_the_first_alone(name: str, *, stays: bool, ended: Path) -> str:
    trainer, data = trained(timeout=1.5)
    if not trainer.is_main:
        end = time.monotonic() + (20 if stays else 0)
        while not ended.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return ""
    try:
        with pytest.raises(DistributedError) as raised:
            CALLS[name](trainer, data)
    finally:
        ended.touch()
    return str(raised.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_one_process_alone_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text = launch(lambda: on_the_first_alone(name, stays=True, ended=tmp_path / "ended"), processes=2, timeout=50)
    lines = text.splitlines()
    assert lines[0] == "rank 1 has not come to this run"
    fit = line_of("    trainer.fit(data, epochs=1)")
    assert f"last heard of at epoch 1, after update 2, in fit (test_blaming.py:{fit})" in lines[1]
    where = line_of(f'"{name}": lambda')
    assert lines[2].strip() == f"rank 0 waits for it in {name} (test_blaming.py:{where})"
    assert lines[3] == "  want  a word from every process within 1.5 s"
    assert lines[4] == f"  fix   call {name} on every process, in the same order, and not under `if trainer.is_main:`"


def test_who_has_gone_before_a_call_of_all_is_not_said_to_be_late(tmp_path: Path) -> None:
    text = launch(lambda: on_the_first_alone("evaluate", stays=False, ended=tmp_path / "e"), processes=2, timeout=50)
    assert text.startswith("rank 1 has not come to this run\n")
    assert "within 1.5 s" not in text
    assert "fix   call evaluate on every process" in text


def test_the_time_out_is_named_only_where_it_has_passed() -> None:
    cause = {"kind": "silent", "rank": 1, "by": 0, "what": ""}
    assert "a word from every process within 7 s" in told(cause, 7)
    closed = told({**cause, "gone": True}, 7)
    assert closed.startswith("rank 1 does not answer, and its connections are closed\n") and "7 s" not in closed


def test_who_only_follows_another_says_where_it_waited() -> None:
    cause = {"kind": "error", "rank": 1, "by": 1, "what": "RuntimeError: timed out", "host": "a", "pid": 3}
    try:
        torch.zeros(2).view(3)
    except RuntimeError as error:
        here = peer_errors.line_of(error)
    assert here == f"test_blaming.py:{line_of('torch.zeros(2).view(3)')}"
    assert f"  have  rank 1 on a, process 3\n        this process waited at {here}\n" in told(cause, 7, here=here)


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        (Counters(), "epoch 1, after update 0"),
        (Counters(epoch=1, batch=3, updates=9, earlier_epochs=2, earlier_updates=8), "epoch 4, after update 17"),
        (Counters(epoch=2, updates=6, stopped="epochs=2 reached"), "epoch 2, after update 6"),
        (Counters(epoch=1, batch=2, updates=5, stopped="asked"), "epoch 2, after update 5"),
    ],
)
def test_epochs_are_told_from_1(counters: Counters, text: str) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner._counters = counters
    assert position_text(owner) == text
