"""Techniques are tried on images that are changed on the device, also where a trial goes round the data."""

from __future__ import annotations

import torch
from torch import nn

from trainwright import Trainer, advise, batches
from trainwright.data import Augment, Normalize


def test_a_trial_that_goes_round_changes_each_image_of_each_pass() -> None:
    torch.manual_seed(0)
    pixels, labels = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8), torch.arange(40) % 3
    changes = [Augment(flip=True), Normalize(mean=(0.5,), std=(0.29,))]
    seen: list[torch.dtype] = []

    class Looks(nn.Flatten):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input.dtype)
            return super().forward(input)

    model = nn.Sequential(Looks(), nn.Linear(16, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), console=False)
    advice = advise(trainer, batches((pixels, labels), 20, shuffle=True, seed=1, augment=changes), seconds=0.3)
    assert {one.name for one in advice.findings} <= {"slow loader"}  # which the clock decides
    assert set(seen) == {torch.float32} and len(seen) > 4
