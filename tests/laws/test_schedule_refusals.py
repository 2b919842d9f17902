"""The Schedule law: what a schedule cannot follow, a run without an end or a rate set by hand, is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Cosine, OneCycle, SettingError, StepLR, TorchSchedule, Trainer
from trainwright.schedules import Linear

from .schedule_runs import Watched, half_cosine, network, one_group, rows_of_data, run, two_groups


@pytest.mark.parametrize("schedule", [OneCycle(0.1), Cosine(), Linear(), lambda u, t: 1.0, StepLR(0.3)])
def test_a_stream_without_max_updates_is_refused_before_the_first_update(schedule):
    given = []

    class Stream:
        def __iter__(self):
            for batch in zip(*(column.split(5) for column in rows_of_data()), strict=True):
                given.append(batch)
                yield batch

    model = network()
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, one_group(model), nn.CrossEntropyLoss(), schedule=schedule, console=False)
    with pytest.raises(SettingError, match="max_updates"):
        trainer.fit(Stream(), epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not given
    assert trainer.fit(Stream(), max_updates=3).updates == 3


@pytest.mark.parametrize(
    "schedule",
    [Cosine(), OneCycle(0.1), TorchSchedule(half_cosine)],
)
@pytest.mark.parametrize("group", [0, 1])
def test_a_rate_set_by_hand_during_fit_is_an_error_that_names_the_group(schedule, group):
    class Meddles(Watched):
        def training_step(self, batch):
            if self.progress.updates == 2:
                self.optimizer.param_groups[group]["lr"] = 0.5
            return super().training_step(batch)

    with pytest.raises(SettingError, match=rf"group {group}.*set by hand") as caught:
        run(schedule, optimizer=two_groups, cls=Meddles)
    assert ("'head'" in str(caught.value)) == (group == 1)


def test_without_a_schedule_a_rate_set_by_hand_is_used_and_reported():
    class Warms(Watched):
        def training_step(self, batch):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 * (self.progress.updates + 1)
            return super().training_step(batch)

    trainer, reported, _ = run(None, cls=Warms, epochs=1)
    assert (
        [row[0][0] for row in trainer.seen] == [update.lr for update in reported] == [0.01 * (n + 1) for n in range(7)]
    )
