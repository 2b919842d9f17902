"""The Window law along a run: where its windows begin and end, and when their batches are asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn
from torch.nn import functional as F

from records import Records
from trainwright import Trainer

from .models import distance
from .window_cases import UNEVEN, Shape, by_hand, draw, twins


class Asked:
    """Batches without a length; notes how many updates had been made when each was asked for."""

    def __init__(self, data):
        self.data, self.made, self.times = data, None, []

    def __iter__(self):
        for batch in self.data:
            self.times.append(self.made.progress.updates)
            yield batch


def check_on_policy(k=3):
    """A batch is asked for only when the update before its window is applied."""
    data = Asked(draw(replace(UNEVEN, k=1), "classes"))
    data.made = Trainer(*twins()[0], nn.CrossEntropyLoss(), accumulate=k, console=False)
    data.made.fit(data, epochs=2)
    per_epoch = math.ceil(7 / k)
    assert data.times == [j // k + per_epoch * epoch for epoch in range(2) for j in range(7)]


def test_accumulation_by_epoch_cuts_each_epoch_anew(shape=UNEVEN):
    """`accumulate` by epoch: each epoch is cut by its own k, from its first batch on."""
    theirs, ours = twins()
    data, seen = draw(replace(shape, k=1), "classes"), Records()
    groups = []
    for k in (1, 1, 4, 4, 4):
        groups += [data[i : i + k] for i in range(0, 7, k)]
    by_hand(*theirs, F.cross_entropy, groups)
    made = Trainer(*ours, nn.CrossEntropyLoss(), accumulate={0: 1, 2: 4}, observers=[seen], console=False)
    made.fit(data, epochs=5)
    assert [update.rows for update in seen.updates] == [sum(len(y) for _, y in group) for group in groups]
    assert [update.epoch for update in seen.updates] == [0] * 7 + [1] * 7 + [2] * 2 + [3] * 2 + [4] * 2
    assert distance(ours[0], theirs[0]) <= 1e-12


@pytest.mark.parametrize("k", [1, 3, 4])
def test_a_batch_is_asked_for_when_the_update_before_is_applied(k):
    check_on_policy(k)


def test_an_endless_stream_loses_no_batch_at_the_ends_of_epochs(k=3):
    """Epochs cut from an endless stream by `epoch_updates`: its windows are all full, and no batch is lost."""
    shape = Shape((2, 3, 1, 4) * 6, (1,) * 24, k=k)
    theirs, ours = twins()
    data, seen = draw(shape, "classes"), Records()
    by_hand(*theirs, F.cross_entropy, shape.grouped(data))
    made = Trainer(*ours, nn.CrossEntropyLoss(), accumulate=k, observers=[seen], console=False)
    made.fit(iter(data), max_updates=8, epoch_updates=3)
    assert [update.epoch for update in seen.updates] == [0] * 3 + [1] * 3 + [2] * 2
    assert distance(ours[0], theirs[0]) <= 1e-12
