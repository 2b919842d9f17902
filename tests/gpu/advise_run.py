"""Advice for a small convolutional network on any device, and what must be true of it."""

from __future__ import annotations

import torch
from torch import nn

from trainwright import Trainer, advise, batches
from trainwright.tools import Advice


def advice_on(device: torch.device, *, seconds: float, width: int = 64) -> tuple[Advice, bool]:
    """Advice, and whether every weight, state and random number is what it was."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), device=device, console=False)
    data = batches((torch.randn(512, 3, 16, 16), torch.arange(512) % 4), 64, shuffle=True)
    before = _state(trainer, device)
    advice = advise(trainer, data, seconds=seconds)
    after = _state(trainer, device)
    return advice, len(before) == len(after) and all(map(torch.equal, before, after))


def _state(trainer: Trainer[nn.Sequential], device: torch.device) -> list[torch.Tensor]:
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    states = [one for state in trainer.optimizer.state.values() for one in state.values()]
    draws = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [one.detach().cpu().clone() for one in (*tensors, *states, *draws)]
