"""How a run ends by an error: the exception as it was, and a reason of one line in the Result."""

from __future__ import annotations

import pytest
import torch
from small import BATCHES, small

from trainwright import Checkpoint, NonFiniteError, Trainer


def test_a_run_that_has_more_epochs_than_are_asked_for_says_how_many(tmp_path):
    def fit(**ends):
        return small(checkpoint=Checkpoint(tmp_path)).fit(BATCHES, resume="auto", **ends).stopped

    assert fit(epochs=2) == "epochs=2 reached"
    assert fit(epochs=2) == "epochs=2 reached"
    assert fit(epochs=1) == "epochs=1 reached: 2 are done already"


def ended_by(error, data, cls=Trainer):
    trainer = small(cls)
    with pytest.raises(error):
        trainer.fit(data, epochs=2)
    return trainer.result.stopped


def test_the_reason_is_the_first_line_of_a_longer_message():
    data = [(torch.full((2, 3), torch.nan), torch.zeros(2, 1))]
    assert ended_by(NonFiniteError, data) == "NonFiniteError: update 1: the loss is not finite; no weight was changed"


def test_an_interrupt_without_a_message_is_named_and_nothing_else():
    class Interrupted(Trainer):
        def training_step(self, batch):
            raise KeyboardInterrupt

    assert ended_by(KeyboardInterrupt, BATCHES, Interrupted) == "KeyboardInterrupt"
