"""What belongs to one process alone: parts with `each_process`, a plan, settings that no process would use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import Pool
from trainwright import DDP, Checkpoint, SettingError, Trainer, batches


class Counted:
    """State of which every process has its own."""

    each_process = True

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        """The value."""
        return {"value": self.value}

    def load_state_dict(self, tree: dict[str, int]) -> None:
        """Take it over."""
        self.value = tree["value"]


class WithPart(Trainer[nn.Linear]):
    """A trainer with such a part."""

    counted = Counted(-1)

    def parts(self) -> dict[str, Any]:
        """The part besides."""
        return super().parts() | {"counted": self.counted}


class OwnUpdate(Trainer[nn.Linear]):
    """A trainer with an update of its own."""

    def update(self, window: Any) -> Any:
        """The default one."""
        return super().update(window)


def _data() -> Any:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    return batches((x, x.sum(1, keepdim=True)), 4)


def saved_and_resumed(directory: Path) -> tuple[int, int]:
    """Save parts of each process, resume with others; what this process has then, and its rank."""
    values = []
    for epochs, value in ((1, 10), (2, 0)):
        model = nn.Linear(4, 1)
        settings = Checkpoint(directory)
        trainer = WithPart(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), checkpoint=settings)
        trainer.counted = Counted(value + trainer.world.rank if value else 0)
        trainer.fit(_data(), epochs=epochs, resume="auto")
        values.append(trainer.counted.value)
    return values[-1], trainer.world.rank


def planned_alone() -> int | None:
    """A plan on the first process alone: it is arithmetic, and no other need come."""
    model = nn.Linear(4, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    return trainer.plan(_data(), epochs=2).updates if trainer.is_main else None


def compressed_beside_an_own_update() -> str:
    """The refusal of a compression beside a custom `update`."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OwnUpdate(model, optimizer, nn.MSELoss(), console=False, parallel=DDP(compress="fp16"))
    with pytest.raises(SettingError) as raised:
        trainer.fit(_data(), epochs=1)
    return str(raised.value)


class ByHand(Trainer[nn.Linear]):
    """A trainer whose update is a loop of one's own, with a step by hand."""

    def update(self, window: Any) -> Any:
        """Plain torch."""
        for x, y in window:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        return loss


def stepped_by_hand() -> list[float]:
    """The weights that steps by hand end with, over batches of which processes get unequal parts."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(15, 4) ** 3
    trainer = ByHand(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), console=False)
    trainer.fit(batches((x, x.sum(1, keepdim=True)), 4), epochs=3)
    flat: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return flat


def wrapped_already() -> str:
    """The refusal of a model in DistributedDataParallel."""
    Trainer(nn.Linear(1, 1), console=False)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    with pytest.raises(SettingError) as raised:
        Trainer(wrapped, console=False)
    return str(raised.value)


def test_each_process_gets_its_own_part_back(ranks2: Pool, tmp_path: Path) -> None:
    assert ranks2.run(saved_and_resumed, tmp_path) == [(10, 0), (11, 1)]


def test_a_plan_needs_no_other_process(ranks2: Pool) -> None:
    assert ranks2.run(planned_alone) == [8, None]


def test_a_compression_beside_an_update_of_your_own_is_refused(ranks2: Pool) -> None:
    for text in ranks2.run(compressed_beside_an_own_update):
        assert "compress" in text and "fix" in text


def test_a_step_by_hand_uses_the_averaged_gradients(ranks2: Pool) -> None:
    alone = stepped_by_hand()
    for weights in ranks2.run(stepped_by_hand):
        assert weights == pytest.approx(alone, abs=1e-12)


def test_a_model_that_is_wrapped_already_is_refused(ranks2: Pool) -> None:
    for text in ranks2.run(wrapped_already):
        assert "Trainer(model.module, ...)" in text
