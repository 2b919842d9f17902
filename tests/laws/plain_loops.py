"""The plain loop, and the same by the Trainer: shared by the tests of the Plain law."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import torch

from records import Records
from trainwright import Trainer

from .models import assert_equal

EPOCHS = 9
"""Times 6 batches: 54 updates."""


def cast(precision):
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def by_hand(model, optimizer, loss_of, data, *, precision=None, epochs=EPOCHS, between=None, after=None):
    """The plain loop. `between`: after backward; `after`: at an epoch's end. Returns losses of updates and the RNG."""
    torch.manual_seed(3)
    losses = []
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            with cast(precision):
                loss = loss_of(model(x), y)
            loss.backward()
            if between is not None:
                between(model)
            optimizer.step()
            losses.append(loss.item())
        if after is not None:
            after()
    return losses, torch.get_rng_state()


def by_trainer(model, optimizer, loss, data, *, val=None, epochs=EPOCHS, trainer=Trainer, validate=None, **settings):
    """The same by the Trainer."""
    torch.manual_seed(3)
    untouched = random.getstate(), np.random.get_state()
    seen = Records()
    made = trainer(model, optimizer, loss, console=False, observers=[seen], **settings)
    result = made.fit(data, val, epochs=epochs, **({} if validate is None else {"validate": validate}))
    rng = torch.get_rng_state()
    assert_equal((random.getstate(), np.random.get_state()[1].tolist()), (untouched[0], untouched[1][1].tolist()))
    assert result.updates >= 50 and len(seen.updates) == result.updates + result.skipped
    return made, result, seen.losses, rng
