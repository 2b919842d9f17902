"""The arithmetic of a run, and what contradicts it, before its first update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import DataError, SettingError, Trainer, batches


def make(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False, **settings)


def rows_of_data(rows=20):
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


@pytest.mark.parametrize(
    ("accumulate", "ends", "updates"),
    [
        (1, {"epochs": 2}, 14),
        (3, {"epochs": 2}, 6),
        (7, {"epochs": 2}, 2),
        (50, {"epochs": 2}, 2),
        ({0: 1, 1: 4}, {"epochs": 3}, 7 + 2 + 2),
        (2, {"max_updates": 5}, 5),
        (2, {"epochs": 2, "max_updates": 5}, 5),
        (2, {"epochs": 1, "max_updates": 5}, 4),
    ],
)
def test_the_plan_counts_the_updates_that_the_run_makes(accumulate, ends, updates):
    trainer = make(accumulate=accumulate)
    data = batches(rows_of_data(), 3)
    before = trainer.model.weight.clone()
    plan = trainer.plan(data, **ends)
    assert plan.updates == updates
    assert (plan.batches, plan.rows, plan.batch_size) == (7, 20, 3)
    assert torch.equal(before, trainer.model.weight)
    assert trainer.progress.updates == 0
    assert trainer.fit(data, **ends).updates == updates


def test_a_plan_leaves_the_random_state_alone():
    trainer = make()
    train, val = batches(rows_of_data(), 3, shuffle=True), batches(rows_of_data(), 3)
    before = torch.get_rng_state()
    trainer.plan(train, val, epochs=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_stream_has_no_number_of_updates_without_max_updates():
    def stream():
        yield rows_of_data()

    assert make().plan(stream(), epochs=1).updates is None
    assert make().plan(stream(), max_updates=9).updates == 9
    assert make().plan(stream(), epochs=3, epoch_updates=4).updates == 12


@pytest.mark.parametrize(
    ("ends", "match"),
    [
        ({}, "was not told when to end"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": True}, "epochs=True"),
        ({"epochs": 2.0}, "epochs=2.0"),
        ({"max_updates": -1}, "max_updates=-1"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"epochs": 1, "epoch_updates": 3}, "epoch_updates=3"),
    ],
)
def test_ends_that_cannot_work_are_refused_before_the_first_update(ends, match):
    trainer = make()
    before = trainer.model.weight.clone()
    with pytest.raises(SettingError, match=match):
        trainer.fit(batches(rows_of_data(), 3), **ends)
    with pytest.raises(SettingError, match=match):
        trainer.plan(batches(rows_of_data(), 3), **ends)
    assert torch.equal(before, trainer.model.weight)


def test_several_epochs_of_a_generator_are_refused_with_the_function_to_write():
    with pytest.raises(DataError, match="lambda epoch"):
        make().fit((rows_of_data() for _ in range(3)), epochs=2)
