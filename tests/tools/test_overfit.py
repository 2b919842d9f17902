"""Overfitting a few batches: what can learn is told from what cannot, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from test_smoke_run import data, made, x, y
from torch import nn

from trainwright import SettingError, Trainer, batches
from trainwright.tools import overfit_batches, smoke_run


def test_a_model_that_can_learn_gets_its_loss_to_near_zero() -> None:
    trainer = made(accumulate=4, clip=1.0)
    trainer.optimizer.param_groups[0]["lr"] = 0.05
    reported = overfit_batches(trainer, data(), 2)
    assert reported.fell and reported.batches == 2 and reported.updates == 2 * len(reported.losses) < 300
    assert reported.losses[-1] <= 0.05 * reported.losses[0] and reported.losses[-2] <= 0.05 * reported.losses[0]
    assert not reported.untrained and "can learn" in str(reported)


def test_what_is_reported_is_plain_data() -> None:
    reported = overfit_batches(made(), data(), 1, updates=3)
    tree = json.loads(json.dumps(reported.to_dict()))
    assert tree["losses"] == list(reported.losses) and tree["fell"] is reported.fell
    ran = smoke_run(made(), data())
    tree = json.loads(json.dumps(ran.to_dict()))
    assert tree["losses"] == list(ran.losses) and tree["numbers"] == dict(ran.numbers)


def test_the_losses_are_those_of_a_plain_loop_on_the_same_batches() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    reported = overfit_batches(trainer, batches((x, y), 5, shuffle=False), 2, updates=8)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        each = []
        for rows in (slice(0, 5), slice(5, 10)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            each.append(loss.item())
        losses.append(sum(each) / 2)
    assert reported.losses == pytest.approx(losses, rel=1e-6) and reported.updates == 8


def test_a_loss_that_stays_and_what_no_gradient_reaches_are_reported() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(inputs).detach() * 0)

    torch.manual_seed(0)
    model = Cut()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss(), console=False)
    reported = overfit_batches(trainer, data(8), updates=40)
    assert not reported.fell and reported.updates == 40
    assert reported.untrained == ("body.weight", "body.bias", "head.weight")
    shown = str(reported)
    assert "does not memorize them" in shown and "no gradient reaches body.weight" in shown
    assert "learning rate 5.00e-1" in shown


def test_a_loss_that_falls_still_is_reported_as_one() -> None:
    reported = overfit_batches(made(), data(), updates=20)
    assert not reported.fell and reported.losses[-1] < reported.losses[0]
    assert "falling still: overfit_batches(..., updates=80)" in str(reported) and "find_lr" not in str(reported)


def test_a_loss_that_is_not_finite_is_no_success() -> None:
    class Diverges(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch) * [1.0, 1e-3, float("nan")][self.progress.updates]

    reported = overfit_batches(made(Diverges), data())
    assert not reported.fell and len(reported.losses) == 2 and reported.losses[1] < 0.01 * reported.losses[0]
    assert "update 3" in reported.error and reported.error in str(reported)


def test_dropout_is_off_inside_and_on_again_after() -> None:
    class Looks(Trainer[Any]):
        seen: ClassVar[set[bool]] = set()

        def training_step(self, batch: Any) -> Any:
            self.seen.add(self.model[2].training)
            assert self.model[1].training
            return super().training_step(batch)

    trainer = made(Looks)
    overfit_batches(trainer, data(), updates=3)
    assert Looks.seen == {False} and trainer.model[2].training


@pytest.mark.parametrize("wrong", [{"batches": 0}, {"updates": 0}, {"share": 0.0}, {"share": 1.0}, {"batches": 1.5}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="want"):
        overfit_batches(made(), data(), **wrong)
