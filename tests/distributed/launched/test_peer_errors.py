"""The messages about a rank that fails or does not come: its position, the call that waits for it, and the fix."""

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
from trainwright.distributed import peer_watch
from trainwright.distributed.launch import launch
from trainwright.distributed.peer_watch import Cause, Heartbeat, error_text
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
def test_a_call_on_one_rank_alone_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text = launch(lambda: on_the_first_alone(name, stays=True, ended=tmp_path / "ended"), processes=2, timeout=50)
    lines = text.splitlines()
    assert lines[0] == "rank 1 has not entered this run"
    fit = line_of("    trainer.fit(data, epochs=1)")
    assert f"last seen at epoch 1, after update 2, in fit (test_peer_errors.py:{fit})" in lines[1]
    where = line_of(f'"{name}": lambda')
    assert lines[2].strip() == f"rank 0 waits for it in {name} (test_peer_errors.py:{where})"
    assert lines[3] == "  want  a heartbeat of every process within 1.5 s"
    assert lines[4] == f"  fix   call {name} on every process, in the same order, and not under `if trainer.is_main:`"


def test_a_rank_that_has_left_before_a_call_is_not_reported_as_late(tmp_path: Path) -> None:
    text = launch(lambda: on_the_first_alone("evaluate", stays=False, ended=tmp_path / "e"), processes=2, timeout=50)
    assert text.startswith("rank 1 has not entered this run\n")
    assert "within 1.5 s" not in text
    assert "fix   call evaluate on every process" in text


def test_the_timeout_is_named_only_where_it_has_passed() -> None:
    cause = Cause("silent", rank=1, by=0)
    assert "a heartbeat of every process within 7 s" in error_text(cause, 7)
    closed = error_text(cause._replace(is_closed=True), 7)
    assert closed.startswith("rank 1 does not answer, and its connections are closed\n") and "7 s" not in closed


def test_an_error_that_follows_from_another_ranks_has_the_line_that_waited() -> None:
    last = Heartbeat(0, False, rank=1, host="a", pid=3, progress="", line="", call="")
    cause = Cause("error", rank=1, by=1, last=last, error="RuntimeError: timed out")
    try:
        torch.zeros(2).view(3)
    except RuntimeError as error:
        here = peer_watch.line_of(error)
    assert here == f"test_peer_errors.py:{line_of('torch.zeros(2).view(3)')}"
    assert f"  have  rank 1 on a, process 3\n        this process waited at {here}\n" in error_text(cause, 7, here=here)


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        (Counters(), "epoch 1, after update 0"),
        (Counters(epoch=1, batch=3, updates=9, earlier_epochs=2, earlier_updates=8), "epoch 4, after update 17"),
        (Counters(epoch=2, updates=6, stopped="epochs=2 reached"), "epoch 2, after update 6"),
        (Counters(epoch=1, batch=2, updates=5, stopped="asked"), "epoch 2, after update 5"),
    ],
)
def test_positions_count_epochs_from_1(counters: Counters, text: str) -> None:
    class Partial:
        pass

    trainer: Any = Partial()
    trainer._counters = counters
    assert position_text(trainer) == text


class Failing(Trainer[Any]):
    """Its third step fails: the last batch of the first update is the second."""

    steps = 0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise ValueError("a mistake of the user's own")
        return super().training_step(batch)


def notes_of_a_failed_step() -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Failing(model, optimizer, nn.CrossEntropyLoss(), accumulate=2, console=False)
    with pytest.raises(ValueError, match="a mistake") as raised:
        trainer.fit(batches((torch.randn(32, 4), torch.arange(32) % 2), 8), epochs=1)
    return raised.value.__notes__


def test_an_error_in_a_step_of_several_ranks_names_its_batch() -> None:
    notes = launch(notes_of_a_failed_step, processes=2)
    assert "Failing.training_step failed on train batch 3 of epoch 1" in notes[0]
