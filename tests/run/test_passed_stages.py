"""What the model holds after a stage that was passed over: the weights of that stage, or a warning with each use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, Trainer, batches

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
