"""muon: hidden matrices by torch's Muon, all else by AdamW, in one optimizer that is both bit for bit."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from trainwright import SettingError, Trainer, batches, freeze, unfreeze
from trainwright.optim import muon
from trainwright.optim.optimizers import MuonAdamW

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens).mean(1))
        x = x + self.second(self.first(x).tanh())
        return self.head(self.conv(x.unsqueeze(1)).squeeze(1))


def net():
    torch.manual_seed(0)
    return Net()


def data(rows=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 7, (rows, 5), generator=generator), torch.randint(0, 7, (rows,), generator=generator)


def shares(optimizer, model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    by = {"muon": [], "adamw": []}
    for group in optimizer.param_groups:
        by[group["by"]] += [names[p] for p in group["params"]]
    return by


@needs_muon
def test_hidden_matrices_are_muons_and_the_rest_is_adamws():
    model = net()
    found = shares(muon(lr=0.01)(model), model)
    assert found["muon"] == ["first.weight", "second.weight"]
    assert {"embedding.weight", "head.weight", "norm.weight", "first.bias", "conv.weight"} <= set(found["adamw"])
    assert shares(muon(lr=0.01, others="second")(model), model)["muon"] == ["first.weight", "head.weight"]
    assert shares(muon(lr=0.01, others=())(model), model)["muon"] == ["first.weight", "second.weight", "head.weight"]


def by_hand(model, rates=(0.02, 0.02), *, original=False, fused=True):
    hidden = [model.first.weight, model.second.weight]
    rest = [p for p in model.parameters() if all(p is not h for h in hidden)]
    decays = [p for p in rest if p.dim() > 1]
    still = [p for p in rest if p.dim() < 2]
    adjust = "original" if original else "match_rms_adamw"
    one = torch.optim.Muon(hidden, lr=rates[0], weight_decay=0.1, momentum=0.9, nesterov=False, adjust_lr_fn=adjust)
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    return one, torch.optim.AdamW(groups, lr=rates[1], betas=(0.8, 0.9), fused=fused)


@needs_muon
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("fused", ["auto", False])
def test_a_run_is_that_of_both_by_hand(original, fused):
    model, twin = net(), net()
    rates = {"adjust_lr": "original", "adamw_lr": 0.003} if original else {}
    made = muon(lr=0.02, momentum=0.9, nesterov=False, betas=(0.8, 0.9), fused=fused, **rates)
    trainer = Trainer(model, made, nn.CrossEntropyLoss(), console=False)
    trainer.fit(batches(data(), 8), epochs=3)
    both = by_hand(twin, (0.02, 0.003 if original else 0.02), original=original, fused=fused == "auto")
    x, y = data()
    for rows in [slice(0, 8), slice(8, 16), slice(16, 24)] * 3:
        for optimizer in both:
            optimizer.zero_grad()
        nn.functional.cross_entropy(twin(x[rows]), y[rows]).backward()
        for optimizer in both:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@needs_muon
def test_state_goes_through_copies_and_pickles():
    def step(model, optimizer):
        optimizer.zero_grad()
        model(data()[0]).square().sum().backward()
        optimizer.step()

    model = net()
    optimizer = muon(lr=0.02)(model)
    step(model, optimizer)
    copied, pickled = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    loaded = net()
    loaded.load_state_dict(model.state_dict())
    other = muon(lr=0.7)(loaded)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch takes tensors as they are
    pairs = [(model, optimizer), copied, pickled, (loaded, other)]
    for pair in pairs:
        step(*pair)
        step(*pair)
    for one, _ in pairs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), one.parameters(), strict=True))


@needs_muon
def test_a_frozen_part_trains_when_it_is_unfrozen():
    model = net()
    freeze(model, "first")
    trainer = Trainer(model, muon(lr=0.02), nn.CrossEntropyLoss(), console=False)
    before = model.first.weight.clone()
    trainer.fit(batches(data(), 8), epochs=1)
    assert torch.equal(before, model.first.weight)
    unfreeze(model, "first")
    trainer.fit(batches(data(), 8), epochs=1)
    assert not torch.equal(before, model.first.weight)


@needs_muon
def test_a_closure_and_a_group_that_is_added_later_work():
    model = net()
    optimizer = muon(lr=0.02)(model)
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "by": "adamw", "lr": 0.5, "name": "late", "param_names": ["late"]})

    def closure():
        optimizer.zero_grad()
        loss = model(data()[0]).square().sum() + late.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert torch.allclose(late, torch.full((3,), 1 - 0.5 * 0.01 - 0.5))  # AdamW's own decay, and a first step of lr
    with pytest.raises(SettingError, match="by=None"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="2D"):
        optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))], "by": "muon"})


def test_a_torch_without_muon_says_which_one_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(SettingError, match=r"has no torch\.optim\.Muon\n  want  torch 2\.9 or later"):
        muon(lr=0.02)
    with pytest.raises(SettingError, match="has no torch"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "by": "muon"}])


@needs_muon
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(muon, lr=0.0), r"muon\(lr=0\.0\)\n  want  a number above 0"),
        (partial(muon, lr=0.1, momentum=1.0), r"muon\(momentum=1\.0\)"),
        (partial(muon, lr=0.1, adjust_lr="rms"), r"muon\(adjust_lr='rms'\)"),
        (partial(muon, lr=0.1, adjust_lr="original"), r"its rate is no rate for AdamW(.|\n)*adamw_lr=3e-4"),
        (partial(muon, lr=0.1, betas=0.9), r"muon\(betas=0\.9\)"),
        (partial(muon, lr=0.1, others=3), r"muon\(others=3\)"),
        (partial(muon, lr=0.1, nesterov="yes"), r"muon\(nesterov='yes'\)"),
        (lambda: muon(lr=0.1, others="hed")(net()), r"Did you mean 'head'"),
        (lambda: muon(lr=0.1)(nn.Linear(2, 2)), r"Linear has no hidden layer with a matrix(.|\n)*adamw\(lr=0\.1\)"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make, said):
    with pytest.raises(SettingError, match=said):
        make()
