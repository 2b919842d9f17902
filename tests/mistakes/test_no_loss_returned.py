"""A step that returns no loss is named, with the place where it is written."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from trainwright import MeanLoss, SettingError, StepError, Trainer


class Forgets(Trainer):
    def training_step(self, batch):
        self.model(batch[0])


class ForgetsInValidation(Trainer):
    def validation_step(self, batch):
        return "a word"


@pytest.mark.parametrize(("cls", "name"), [(Forgets, "training_step"), (ForgetsInValidation, "validation_step")])
def test_the_step_that_returned_it_is_named_with_its_line(cls, name):
    model = nn.Linear(2, 1)
    before = [p.clone() for p in model.parameters()]
    trainer = cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    rows = [(torch.ones(3, 2), torch.ones(3, 1))]
    with pytest.raises(StepError) as caught:
        trainer.fit(rows, rows if name == "validation_step" else None, epochs=1)
    line = inspect.getsourcelines(getattr(cls, name))[1]
    assert caught.value.__notes__ == [f"trainwright: {cls.__name__}.{name} (test_no_loss_returned.py:{line})"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class LossInATuple(nn.Linear):
    """As minGPT: scores and loss."""

    def forward(self, x, y=None):
        output = super().forward(x)
        return output, None if y is None else nn.functional.mse_loss(output, y)


class LossesInADict(nn.Linear):
    """As torchvision's detectors."""

    def forward(self, x, y):
        output = super().forward(x)
        return {"fit": nn.functional.mse_loss(output, y), "size": output.square().mean()}


@pytest.mark.parametrize("build", [LossInATuple, LossesInADict])
def test_a_model_that_returns_its_losses_in_another_form_gets_the_step_to_write(build):
    model, rows = build(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))]
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "console": False}
    with pytest.raises(SettingError, match="no loss: loss is None") as caught:
        Trainer(model, **settings).fit(rows, epochs=1)
    fix = next(line for line in str(caught.value).splitlines() if line.startswith("  fix")).removeprefix("  fix")
    namespace = {}
    exec(fix.strip(), namespace)
    step = {"training_step": namespace["training_step"]}
    assert type("Mended", (Trainer,), step)(model, **settings).fit(rows, epochs=1).updates == 1


@pytest.mark.parametrize(
    ("losses", "says", "fix"),
    [
        (lambda loss: {"a": loss, "b": 0.5}, "returned float as its loss 'b'", r"self\.log\('b', value\)"),
        (
            lambda loss: {"a": MeanLoss(loss, 3), "b": loss},
            "a, b are not of one form",
            r"return MeanLoss\(a \+ b, count\)",
        ),
    ],
)
def test_named_losses_that_are_none_or_of_different_counts_say_what_to_write(losses, says, fix):
    class Named(Trainer):
        def training_step(self, batch):
            return losses(self.loss(self.model(batch[0]), batch[1]))

    model = nn.Linear(2, 1)
    trainer = Named(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    with pytest.raises(StepError, match=rf"{says}(.|\n)*fix +{fix}"):
        trainer.fit([(torch.ones(3, 2), torch.ones(3, 1))], epochs=1)
