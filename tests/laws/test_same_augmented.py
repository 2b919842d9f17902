"""World and Same for images that are changed on the device: n processes train on the images that one trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright import Trainer, batches
from trainwright.data import Augment, Normalize
from world.pool import pool

EXACT = 1e-12


def as_double(images: Tensor, draws: Any) -> Tensor:
    """So that processes differ from one by the order of adding up alone; noise of each row's own besides."""
    return images.double() + 0.1 * draws.uniform(1, 1, 1)


def changed() -> Any:
    generator = torch.Generator().manual_seed(6)
    images = torch.randint(0, 256, (26, 2, 5, 5), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (26,), generator=generator)
    pieces = [Augment(flip=True, crop=2), Normalize((0.5, 0.4), (0.2, 0.3)), as_double]
    return batches((images, labels), 7, shuffle=True, seed=3, augment=pieces)


def train(accumulate: int) -> tuple[list[float], list[float]]:
    """The weights and the losses of a training with evaluations."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), accumulate=accumulate, console=False)
    result = trainer.fit(changed(), epochs=3)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return weights.tolist(), [row["loss"] for row in result.history]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_train_on_the_images_of_one(size: int, accumulate: int) -> None:
    wanted = train(accumulate)
    for weights, losses in pool(size).run(train, accumulate):
        assert weights == pytest.approx(wanted[0], rel=EXACT, abs=EXACT)
        assert losses == pytest.approx(wanted[1], rel=EXACT)
