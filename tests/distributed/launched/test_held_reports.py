"""Updates whose report is held until the next exchange of the ranks are reported however the run ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import Pool, RankFailed
from trainwright import DistributedError, Observer, Result, Stopped, Trainer, batches
from trainwright.observers import Update

UPDATES = 40
"""The update after which the run ends: the ranks have exchanged nothing since some updates before."""


class Recorder(Observer):
    """Records the updates, and how many were reported before the end."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.before_the_end = -1

    def on_update(self, update: Update) -> None:
        self.updates.append(update)

    def on_fit_end(self, result: Result) -> None:
        self.before_the_end = len(self.updates)


class Ending(Trainer[nn.Module]):
    """Logs 0 on rank 0 and 1 on rank 1, and ends as `how` says."""

    how = ""

    def training_step(self, batch: Any) -> Any:
        self.log("rank", float(self.world.rank))
        if self.progress.updates == UPDATES and self.how in (f"error on {self.world.rank}", "error on both"):
            raise ValueError("bad row 17")
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def after_update(self) -> None:
        if self.progress.updates == UPDATES and not self.is_main:
            if self.how == "stop":
                self.stop("enough")
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)


def end(how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    recorder, model = Recorder(), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Ending(model, optimizer, observers=[recorder], console=False)
    trainer.how, error = how, ""
    try:
        trainer.fit(batches((torch.randn(80_000, 4), torch.randint(3, (80_000,))), 8), epochs=1)
    except (ValueError, DistributedError, Stopped) as raised:
        error = type(raised).__name__
    assert trainer.result is not None
    reported = [(update.update, update.values["rank"]) for update in recorder.updates]
    made, at_end = trainer.result.updates, recorder.before_the_end
    return {"reported": reported, "made": made, "error": error, "at_end": at_end, "notes": trainer.result.notes}


@pytest.mark.parametrize("how", ["stop", "signal"])
def test_a_stop_and_a_signal_report_every_update_with_the_numbers_of_all_ranks(ranks2: Pool, how: str) -> None:
    first, second = ranks2.run(end, how)
    assert UPDATES <= first["made"] == second["made"] < 10_000
    assert first["reported"] == [(update, 0.5) for update in range(1, first["made"] + 1)]
    assert first["at_end"] == first["made"] and second["reported"] == []
    assert not any("rank 0 alone" in note for note in first["notes"])
    assert first["error"] == second["error"] == ("Stopped" if how == "signal" else "")


def check_reported_by_rank_0(first: dict[str, Any], error: str) -> None:
    """Every update is reported once, before the end: the last of them with rank 0's numbers, as the Result notes."""
    assert first["error"] == error and first["at_end"] == UPDATES
    assert [update for update, _ in first["reported"]] == list(range(1, UPDATES + 1))
    alone = [update for update, rank in first["reported"] if rank == 0.0]
    assert alone and alone == list(range(alone[0], UPDATES + 1))
    which = f"update {UPDATES} was" if len(alone) == 1 else f"updates {alone[0]} to {UPDATES} were"
    assert (
        f"{which} reported with the numbers of rank 0 alone: the run ended before the ranks synchronized"
        in first["notes"]
    )


def test_an_error_on_all_ranks_reports_the_held_updates_with_the_numbers_of_rank_0(ranks2: Pool) -> None:
    first, second = ranks2.run(end, "error on both")
    check_reported_by_rank_0(first, "ValueError")
    assert second["notes"] == () and second["reported"] == []


def end_and_leave(path: str) -> None:
    """The second process ends with its error, and its connections with it."""
    reported = end("error on 1")
    if os.environ["LOCAL_RANK"] == "1":
        os._exit(3)
    Path(path).write_text(json.dumps(reported))


def test_an_error_on_another_rank_reports_the_held_updates_too(ranks2: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2"):
        ranks2.run(end_and_leave, str(tmp_path / "reported"))
    check_reported_by_rank_0(json.loads((tmp_path / "reported").read_text()), "DistributedError")
