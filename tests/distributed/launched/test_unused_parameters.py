"""A parameter that one process alone does not use, inside an epoch, ends all at once and names the cure."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distributed.pool import Pool, RankFailed
from trainwright import DistributedError, StepError, Trainer, batches
from trainwright.distributed.ddp import DDP


class AtTimes(nn.Module):
    """Has a layer that only batches use whose first number is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Three scores for each row."""
        out: Tensor = self.always(x)
        return out + self.at_times(x) if x[0, 0] > 0 else out


def train(settings: DDP, directory: str) -> None:
    """In the second of three batches the last process does not use the layer; what comes of it goes into a file."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    x[:, 0] = 1.0
    x[12:16, 0] = -1.0
    model = AtTimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), parallel=settings, console=False)
    began, error = time.monotonic(), ""
    try:
        trainer.fit(batches((x, y), 8), epochs=1)
    except (StepError, DistributedError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    report = {"error": error, "updates": trainer.progress.updates, "weights": weights}
    report["seconds"] = time.monotonic() - began
    (Path(directory) / str(trainer.world.rank)).write_text(json.dumps(report))
    if error and not trainer.is_main:
        os._exit(3)  # as a script ends that does not catch it: its connections are gone


def test_a_parameter_unused_on_one_rank_ends_all_and_names_the_fix(ranks2: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="exit code 3"):
        ranks2.run(train, DDP(), str(tmp_path))
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("0", "1"))
    assert second["error"].startswith("StepError: parameters without a gradient in this update")
    assert "DDP(find_unused_parameters=True)" in second["error"]
    assert first["error"].startswith("DistributedError: rank 1 has failed: StepError: parameters without a gradient")
    assert first["updates"] == second["updates"] == 1 and first["weights"] == second["weights"]
    assert max(first["seconds"], second["seconds"]) < 150  # and not the 300 of a process that does not answer


def test_the_fix_works(ranks2: Pool, tmp_path: Path) -> None:
    ranks2.run(train, DDP(find_unused_parameters=True), str(tmp_path))
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("0", "1"))
    assert first["error"] == second["error"] == "" and first["updates"] == second["updates"] == 3
    assert first["weights"] == second["weights"]
