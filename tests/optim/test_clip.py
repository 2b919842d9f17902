"""Clipping: once per update, on the unscaled gradient of the whole window."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import ClipNorm, ClipValue, Observer, SettingError, Trainer


class Norms(Observer):
    wants = frozenset({"grad_norm"})

    def __init__(self):
        self.seen = []

    def on_update(self, update):
        self.seen.append(update.grad_norm)


class Silent(Norms):
    wants = frozenset()


def data():
    generator = torch.Generator().manual_seed(0)
    return [
        (10 * torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in (5, 5, 2, 5, 1)
    ]


def make(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def test_the_norm_is_not_computed_where_nothing_asks_for_it():
    silent = Silent()
    make(observers=[silent]).fit(data(), epochs=1)
    assert silent.seen == [None] * 5


@pytest.mark.parametrize("wrong", [0, -1.0, True, "1", ClipNorm, float("nan")])
def test_a_clip_that_cannot_work_is_refused_when_it_is_given(wrong):
    with pytest.raises(SettingError, match=r"clip=|ClipNorm"):
        make(clip=wrong)
    with pytest.raises(SettingError, match="above 0"):
        ClipValue(0)


@pytest.mark.parametrize("clip", [ClipValue(0.1), ClipNorm(0.1)])
def test_an_optimizer_without_any_gradient_has_nothing_to_clip(clip):
    clip([nn.Parameter(torch.ones(2))])


class Scaled(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.log_scale.exp(), target)


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 3))


def weights_and_biases(model, *beside):
    """The usual two groups: weights first, biases last, whatever the order of the layers."""
    parameters = [p for module in (model, *beside) for p in module.parameters()]
    return [
        {"params": [p for p in parameters if p.dim() == 1][::-1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() > 1][::-1], "weight_decay": 0.1},
    ]


def clipped_by_hand(model, loss, norm_type, batches):
    """The plain loop with several groups, clipped as every script does: over the model's parameters."""
    optimizer = torch.optim.SGD(weights_and_biases(model, loss), lr=0.1, momentum=0.9)
    clipped = [*model.parameters(), *loss.parameters()]
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(clipped, 0.05, norm_type).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("made", [nn.CrossEntropyLoss, Scaled])
@pytest.mark.parametrize(("norm_type", "wants"), [(2.0, Norms), (2.0, Silent), (1.0, Norms)])
def test_clipping_several_groups_equals_torchs_over_the_model_bit_for_bit(made, norm_type, wants):
    batches, model, observer = data() * 8, deep(), wants()
    loss, clip = made(), ClipNorm(0.05, norm_type=norm_type)
    optimizer = torch.optim.SGD(weights_and_biases(model, loss), lr=0.1, momentum=0.9)
    Trainer(model, optimizer, loss, clip=clip, console=False, observers=[observer]).fit(batches, epochs=1)
    other = deep()
    norms = clipped_by_hand(other, made(), norm_type, batches)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    if wants is Norms:
        assert observer.seen == norms


def test_the_norm_that_is_logged_without_a_clip_sums_in_the_models_order():
    batches, model, norms = data() * 8, deep(), Norms()
    optimizer = torch.optim.SGD(weights_and_biases(model), lr=0.1)
    Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=[norms]).fit(batches, epochs=1)
    other, expected = deep(), []
    optimizer = torch.optim.SGD(weights_and_biases(other), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        expected.append(nn.utils.get_total_norm([p.grad for p in other.parameters()]).item())
        optimizer.step()
    assert norms.seen == expected


class Thaws(Trainer):
    """Sets the first layer free in the second epoch: its group comes last in the optimizer, and first in the model."""

    def begin_epoch(self, epoch):
        if epoch == 1:
            self.model[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.model[0].parameters())})


def test_a_group_that_is_added_later_is_clipped_in_the_models_order():
    batches, model = data() * 4, deep()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    Thaws(model, optimizer, nn.CrossEntropyLoss(), clip=0.05, console=False).fit(batches, epochs=2)
    other = deep()
    other[0].requires_grad_(False)
    optimizer = torch.optim.SGD(other[2:].parameters(), lr=0.1)
    for epoch in range(2):
        if epoch == 1:
            other[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(other[0].parameters())})
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.05)
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_each_of_several_optimizers_clips_its_own_in_the_models_order():
    batches, model = data() * 8, deep()
    made = {"head": weights_and_biases(model[4]), "body": weights_and_biases(model[:4])}
    optimizers = {name: torch.optim.SGD(groups, lr=0.1) for name, groups in made.items()}
    clip = {"head": 0.02, "body": 0.05}
    Trainer(model, optimizers, nn.CrossEntropyLoss(), clip=clip, console=False).fit(batches, epochs=1)
    other = deep()
    optimizer = torch.optim.SGD(weights_and_biases(other), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        nn.utils.clip_grad_norm_(other[4].parameters(), 0.02)
        nn.utils.clip_grad_norm_(other[:4].parameters(), 0.05)
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
