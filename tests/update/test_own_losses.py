"""A model that returns its own loss: what it may return, what metrics read, and what its loss is a mean over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from trainwright import MeanLoss, SettingError, Trainer, accuracy, batches

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Model(nn.Linear):
    """Classifies, and gives its loss in the form that is asked for."""

    def __init__(self, form):
        torch.manual_seed(0)
        super().__init__(4, 3)
        self.form = form

    def forward(self, x, labels):
        logits = super().forward(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {
            "scalar": loss,
            "object": Output(loss, logits),
            "dict": {"loss": loss, "logits": logits, "hidden": logits + 1},
            "no loss": {"logits": logits},
            "vector": loss[None],
            "output": logits,
            "tuple": (loss, logits),
            "none": None,
            "number": 3.0,
        }[self.form]


def made(form, cls=Trainer, **settings):
    model = Model(form)
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"console": False} | settings)


def dicts(size=4, sizes=None):
    cuts = sizes or size
    return [{"x": a, "labels": b} for a, b in zip(x.split(cuts), y.split(cuts), strict=True)]


def by_hand(groups):
    """The plain loop: one update for each group of batches, its loss over all rows together."""
    model = Model("scalar")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in groups:
        optimizer.zero_grad()
        model(torch.cat([b["x"] for b in group]), torch.cat([b["labels"] for b in group])).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("form", ["scalar", "object", "dict"])
def test_each_form_trains_as_the_plain_loop(form):
    trainer = made(form)
    result = trainer.fit(dicts(), dicts(), epochs=1)
    model = by_hand([[batch] for batch in dicts()])
    assert torch.equal(trainer.model.weight, model.weight)
    assert result.history[0]["val_loss"] == pytest.approx(model(x, y).item(), rel=1e-6)


@pytest.mark.parametrize("form", ["object", "dict"])
def test_metrics_read_the_logits(form):
    trainer = made(form, metrics={"accuracy": accuracy})
    row = trainer.fit(dicts(5), dicts(5), epochs=1).history[0]
    right = nn.functional.linear(x, trainer.model.weight, trainer.model.bias).argmax(1) == y
    assert row["val_accuracy"] == pytest.approx(right.double().mean().item()) and 0 <= row["accuracy"] <= 1


def test_metrics_beside_a_scalar_are_refused_before_the_first_update():
    trainer = made("scalar", metrics={"accuracy": accuracy})
    with pytest.raises(SettingError, match=r"metric 'accuracy' is never fed(.|\n)*StepOutput\(loss, output, target\)"):
        trainer.fit(dicts(), dicts(), epochs=1)
    assert trainer.progress.updates == 0


def test_a_sequence_goes_in_as_positional_arguments():
    trainer = made("scalar")
    trainer.fit(batches((x, y), 4), epochs=1)
    assert torch.equal(trainer.model.weight, by_hand([[b] for b in dicts()]).weight)


class Language(nn.Module):
    """A mean over the tokens that are not masked, as language models give it."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, input_ids, labels):
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def tokens():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 7, (12, 5), generator=generator)
    labels = ids.roll(1, 1).clone()
    for row in range(12):
        labels[row, row % 5 :] = -100
    labels[:, 0] = ids[:, 1]
    return ids, labels


def parts_of(ids, labels):
    return [{"input_ids": a, "labels": b} for a, b in zip(ids.split([7, 2, 3]), labels.split([7, 2, 3]), strict=True)]


def language(cls=Trainer, **settings):
    model = Language()
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.5), console=False, **settings)


def test_training_weighs_by_the_tokens_that_the_loss_is_a_mean_over():
    ids, labels = tokens()
    trainer = language(accumulate=3)
    row = trainer.fit(parts_of(ids, labels), epochs=1).history[0]
    model = Language()
    loss = model(ids, labels)["loss"]
    loss.backward()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(trainer.model.table.weight, model.table.weight - 0.5 * model.table.weight.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("no loss", r"a dict with 'logits', and no 'loss'"),
        ("vector", r"a tensor of shape \(1,\)"),
        ("output", r"a tensor of shape \(4, 3\)"),
        ("tuple", r"a tuple without a loss"),
        ("none", r"a NoneType without a loss"),
        ("number", r"a float without a loss"),
    ],
)
@pytest.mark.parametrize("val", [False, True])
def test_a_model_that_returns_no_loss_is_refused(form, said, val):
    trainer = made(form)
    match = (
        rf"loss is None, training_step is not overridden, and Model returned {said}(.|\n)*want  a loss, a training_step"
    )
    with pytest.raises(SettingError, match=match):
        trainer.fit(dicts(), dicts() if val else None, epochs=1)
    assert trainer.progress.updates == 0


def test_a_model_that_does_not_take_the_target_is_refused():
    model = nn.Linear(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), console=False)
    for data in (batches((x, y), 4), dicts()):
        with pytest.raises(SettingError, match=r"Linear does not take a complete (list|tuple|dict) with the target"):
            trainer.fit(data, epochs=1)


def test_an_error_inside_such_a_model_stays_its_own():
    class Wrong(nn.Linear):
        def forward(self, x, labels):
            return len(3)

    model = Wrong(4, 3)
    with pytest.raises(TypeError, match="has no len"):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), console=False).fit(dicts(), epochs=1)


def test_a_loss_module_with_parameters_in_no_optimizer_is_refused():
    class Center(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(3, 3))

        def forward(self, output, target):
            return (output - self.centers[target]).pow(2).mean()

    model, loss = nn.Linear(4, 3), Center()
    with pytest.raises(SettingError, match=r"in no optimizer(.|\n)*loss\.centers"):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False).fit(
            batches((x, y), 4), epochs=1
        )
    both = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    Trainer(model, both, loss, console=False).fit(batches((x, y), 4), epochs=1)
    assert loss.centers.any()


def test_a_step_that_returns_a_mean_needs_no_loss():
    class Steps(Trainer):
        def training_step(self, batch):
            return MeanLoss(nn.functional.cross_entropy(self.model(batch[0]), batch[1]), len(batch[0]))

    model = nn.Linear(4, 3)
    trainer = Steps(model, torch.optim.SGD(model.parameters(), lr=0.1), console=False)
    assert "val_loss" in trainer.fit(batches((x, y), 5), batches((x, y), 5), epochs=1).history[0]
