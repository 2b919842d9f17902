"""The Results of all ranks of a failed run name the same update as saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import Pool
from trainwright import Checkpoint, Trainer, Updates, batches


class Fails(Trainer[nn.Module]):
    """Fails on every rank in update 5, before any of them knows that the save of update 4 is complete."""

    def training_step(self, batch: Any) -> Any:
        if self.progress.updates == 4:
            raise ValueError("of the user's own")
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


def notes_of(directory: Path) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    slot = Checkpoint(directory, every=Updates(2))
    trainer = Fails(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=slot, console=False)
    with pytest.raises(ValueError, match="own"):
        trainer.fit(batches((torch.ones(16, 3), torch.ones(16, 1)), 4), epochs=3)
    assert trainer.result is not None
    return [note for note in trainer.result.notes if "update" in note]


@pytest.mark.slow
def test_no_rank_names_another_update_than_rank_0_as_the_one_that_is_saved(ranks2: Pool, tmp_path: Path) -> None:
    first, second = ranks2.run(notes_of, tmp_path)
    assert first == ['saved at update 4: fit(..., resume="auto") continues from there']
    assert set(second) <= set(first)
