"""Weights that somebody changes between two fits are the ones that the next fit trains, and its header says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainwright import EMA, Cosine, Observer, Trainer


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


@pytest.mark.parametrize("again", [0, 1])
def test_a_copy_of_a_trainer_goes_on_as_the_trainer_does(again):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    rows = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    for _ in range(again):
        trainer.fit(rows, epochs=1)
    twin = copy.deepcopy(trainer)
    twin.fit(rows, epochs=2)
    trainer.fit(rows, epochs=2)
    assert twin.model is not model
    assert torch.equal(twin.model.weight, model.weight)
    assert twin.progress.updates == 6


@pytest.mark.parametrize("settings", [{"average": EMA(0.5)}, {"schedule": Cosine()}])
def test_a_copy_of_a_trainer_with_weights_or_rates_to_put_back_is_refused(settings):
    model = nn.Linear(3, 1)
    rows = [(torch.randn(4, 3), torch.randn(4, 1))]
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False, **settings)
    assert copy.deepcopy(trainer).fit(rows, epochs=1).updates == 1
    trainer.fit(rows, epochs=1)
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(trainer\.model\), and a Trainer of its own"):
        copy.deepcopy(trainer)
