"""A tool leaves everything as it was, whether it ends or raises, and refuses what it could not do so with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_trial import Keeps, everything, make, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import EMA, DataError, Trainer, accuracy, advise, find_batch_size, find_lr
from trainwright.schedules import Linear
from trainwright.tools import overfit_batches, smoke_run

pytestmark = pytest.mark.usefixtures("little_to_collect")
TOOLS = {
    "find_lr": partial(find_lr, highest=1.0),
    "find_batch_size": partial(find_batch_size, budget=2**20, most=64),
    "overfit_batches": partial(overfit_batches, updates=8),
    "smoke_run": smoke_run,
}


class Fails(Keeps):
    """Raises at the second step after `left` was set to 2."""

    left = 0

    def training_step(self, batch):
        Fails.left -= 1
        if Fails.left == 0:
            raise ZeroDivisionError("broken")
        return super().training_step(batch)


@pytest.mark.filterwarnings("ignore:find_lr suggests no rate")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_leaves_the_hash_of_everything_as_it_was(name, fails, trained, monkeypatch):
    settings = {"metrics": {"accuracy": accuracy}, "average": EMA(0.9), "clip": 1.0, "accumulate": 2}
    trainer = make(cls=Fails, schedule=Linear(final=0.1), **settings)
    trainer.model[3].bias.requires_grad_(False)
    trainer.model[1].eval()
    data = DataLoader(TensorDataset(*rows()), 8, shuffle=True, generator=torch.Generator().manual_seed(5))
    if trained:
        trainer.fit(data, epochs=1)
    before = everything(trainer), data.generator.get_state().tolist()
    monkeypatch.setattr(Fails, "left", 2 if fails else 0)
    if fails:
        with pytest.raises(ZeroDivisionError, match="broken"):
            TOOLS[name](trainer, data)
    else:
        TOOLS[name](trainer, data)
    assert (everything(trainer), data.generator.get_state().tolist()) == before


@pytest.mark.parametrize("tool", [advise, smoke_run, find_batch_size, find_lr, overfit_batches])
def test_a_stream_that_is_read_once_is_refused_with_the_cure(tool):
    with pytest.raises(DataError, match="a list of ready batches"):
        tool(make(), iter([rows(8)]))


@pytest.mark.parametrize("tool", [advise, smoke_run, find_batch_size, find_lr, overfit_batches])
@pytest.mark.parametrize("exchanged", [True, False])
def test_data_or_a_class_in_the_place_of_a_trainer_is_refused(tool, exchanged):
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    ready = [(torch.randn(4, 3), torch.randn(4, 1))]
    given = (ready, trainer) if exchanged else (Trainer, ready)
    with pytest.raises(TypeError) as caught:
        tool(*given)
    text, name = str(caught.value), tool.__name__
    assert text.startswith(f"{name}({'list' if exchanged else 'Trainer'}, ...)\n")
    assert f"{name}(trainer, train)" in text
