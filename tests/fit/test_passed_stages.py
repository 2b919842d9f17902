"""What the model holds after a stage that was passed over: the weights of that stage, or a warning with each use."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, Observer, Trainer, batches
from trainwright.checkpointing.load import load_checkpoint
from trainwright.fit import context

GONE = "as built (those of this stage are gone)"


def test_the_weights_of_a_passed_stage_are_loaded_where_they_were_kept_and_else_it_is_said(tmp_path, recwarn):
    def script(keep, *, until=3):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        x = torch.randn(12, 3)
        data = batches((x, x.sum(1, keepdim=True)), 4, seed=1)
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.MSELoss(),
            checkpoint=Checkpoint(tmp_path / str(keep), keep=keep),
            console=False,
        )
        first = trainer.fit(data, epochs=2, resume="auto")
        between = {name: value.clone() for name, value in model.state_dict().items()}
        numbers = trainer.evaluate(data)
        trainer.save_weights(tmp_path / "first.safetensors")
        trainer.fit(data, epochs=until, resume="auto")
        return first.weights, between, numbers

    def known(keep):
        before, after = script(keep), script(keep)
        same_weights = all(torch.equal(before[1][name], after[1][name]) for name in before[1])
        return before[0], after[0], same_weights and before[2] == after[2]

    assert known(9) == ("last", "last", True)
    assert not [one for one in recwarn if "passed over" in str(one.message)]
    with pytest.warns(
        UserWarning, match=r"the last fit was passed over, and its weights were not kept.*\(test_passed_stages.py:\d+\)"
    ):
        assert known(1) == ("last", GONE, False)


@pytest.mark.slow
def test_a_stage_that_starts_anew_holds_on_to_nothing_of_the_checkpoint_before_it(tmp_path, monkeypatch):
    read = []

    def noted(*args, **settings):
        loaded = load_checkpoint(*args, **settings)
        read.extend(weakref.ref(value) for value in loaded.tree["model"].values())
        return loaded

    class Watching(Observer):
        alive = ()

        def on_epoch(self, record):
            gc.collect()
            self.alive = [one for one in read if one() is not None]

    data, watching = (torch.ones(8, 3), torch.ones(8, 1)), Watching()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), checkpoint=Checkpoint(tmp_path), observers=[watching], console=False
    )
    trainer.fit(batches(data, 4), epochs=1)
    monkeypatch.setattr(context, "load_checkpoint", noted)
    trainer.fit(batches(data, 4), epochs=1, resume="auto")
    assert len(read) == 2 and watching.alive == []
