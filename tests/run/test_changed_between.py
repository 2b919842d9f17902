"""Weights that somebody changes between two fits are the ones that the next fit trains, and its header says so."""

from __future__ import annotations

import torch
from torch import nn

from trainwright import EMA, Observer, Trainer


class Notes(Observer):
    """Keeps the notes of each header."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, plan):
        self.seen.append(plan.notes)


def test_weights_loaded_between_two_fits_are_trained_and_the_header_says_so():
    torch.manual_seed(0)
    model, notes = nn.Linear(3, 1), Notes()
    rows = [(torch.randn(4, 3), torch.randn(4, 1))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, optimizer, nn.MSELoss(), average=EMA(0.5), console=False, observers=[notes])
    trainer.fit(rows, epochs=1)
    mine = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    model.load_state_dict(mine)
    trainer.fit(rows, epochs=1)
    assert all(torch.equal(value, mine[name]) for name, value in model.state_dict().items())
    trainer.fit(rows, epochs=1)
    said = [any("changed since the last fit" in note for note in one) for one in notes.seen]
    assert said == [False, True, False]
