"""A shrunk model computes what the big one does without those channels, exactly, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import (
    SettingError,
    Trainer,
    accuracy,
    batches,
    checkpoint_activations,
    mask_weights,
    remove_channels,
    shrink,
)
from trainwright.tools import pruning


class Res(nn.Module):
    """Channels inside a residual block may go, those of its sum may not; a grouped convolution stays."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.outer, self.grouped = nn.Conv2d(12, 8, 3, padding=1), nn.Conv2d(8, 8, 1, groups=8)

    def forward(self, x):
        return torch.relu(x + self.grouped(self.outer(torch.sigmoid(self.norm(self.inner(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 8, 3), Res()
        self.conv, self.norm, self.pool = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.MaxPool2d(2)
        self.flat, self.scale = nn.Linear(16 * 4, 20), nn.BatchNorm1d(64)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(20, 10)

    def forward(self, x, mask=None):
        x = self.block(self.stem(x))
        x = self.pool(2 * F.gelu(self.norm(self.conv(x)))) - 0.5
        x = self.scale(x.view(x.size(0), -1))
        if mask is not None:
            x = x * mask
        return self.head(self.drop(torch.tanh(self.flat(x))))


def net(kind=Net):
    torch.manual_seed(0)
    model = kind().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            nn.init.normal_(module.weight), nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2)
    return model


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
LOST = {"block.inner": [0, 3, 11], "conv": [1, 2], "flat": [7, 19]}
READERS = {
    "block.outer": [0, 3, 11],
    "flat": [*range(4, 12)],  # 2 x 2 positions of a channel follow one another
    "head": [7, 19],
}


@pytest.mark.parametrize("training", [False, True])
def test_the_small_model_computes_what_the_masked_big_one_does(training) -> None:
    model = net()
    model.drop.p = 0.0
    small = remove_channels(model, (X, torch.zeros(5)), LOST).model
    assert [*small.state_dict()] == [*model.state_dict()]
    sizes = (small.block.inner.out_channels, small.conv.out_channels, small.flat.in_features, small.flat.out_features)
    assert sizes == (9, 14, 56, 18) and small.scale.num_features == 56
    with torch.no_grad():
        for name, columns in READERS.items():
            model.get_submodule(name).weight[:, columns] = 0
    for one in (model, small):
        one.train(training)
    torch.testing.assert_close(small(X), model(X), rtol=0, atol=1e-12)
    small(X).sum().backward()
    model(X).sum().backward()
    rows = [i for i in range(20) if i not in LOST["flat"]]
    features = [i for i in range(64) if i not in READERS["flat"]]
    torch.testing.assert_close(small.flat.weight.grad, model.flat.weight.grad[rows][:, features], rtol=0, atol=1e-12)
    torch.testing.assert_close(small(X), model(X), rtol=0, atol=1e-12)  # running statistics went along


def test_the_given_model_stays_as_it_was() -> None:
    model = net()
    model.drop.eval()
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    small = shrink(model, X, 0.5).model
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())
    assert torch.equal(draws, torch.get_rng_state())
    assert model.training and not model.drop.training and small.training and not small.drop.training
    assert {id(p) for p in model.parameters()}.isdisjoint(map(id, small.parameters()))


class WritesToItsInputs(Net):
    def forward(self, x):
        return super().forward(x.add_(1.0))


def test_a_forward_that_writes_to_its_inputs_is_given_copies() -> None:
    given, kept = X.clone(), X.clone()
    assert shrink(net(WritesToItsInputs), given, 0.5).removed
    assert torch.equal(given, kept)


def test_each_layer_loses_its_share_of_the_smallest_filters_and_says_why_others_stay() -> None:
    model = net()
    found = shrink(model, X, 0.5)
    least = model.conv.weight.abs().sum((1, 2, 3)).argsort()[:8]
    assert set(found.removed["conv"]) == set(least.tolist())
    assert {name: len(lost) for name, lost in found.removed.items()} == {"block.inner": 6, "conv": 8, "flat": 10}
    assert found.whole == {
        "stem": "its channels meet those of block_grouped in add: a residual connection",
        "block.outer": "block.grouped is a grouped convolution",
        "block.grouped": "block.grouped is a grouped convolution",
        "head": "its channels are the model's output",
    }
    before, after = found.parameters
    assert after == sum(p.numel() for p in found.model.parameters()) < before
    assert "conv: 8 channels removed" in str(found) and "stem stays: its channels meet" in str(found)
    assert shrink(model, X, 0.5, multiple=8).model.flat.out_features == 16


def test_channels_are_ranked_by_the_scale_of_batchnorm_or_by_a_function() -> None:
    model = net()
    found = shrink(model, X, 0.25, by="bn")
    assert set(found.removed["conv"]) == set(model.norm.weight.abs().argsort()[:4].tolist())
    assert found.whole["flat"] == "there is no BatchNorm with a scale behind it"
    last = shrink(model, X, 0.25, by=lambda module, name: -torch.arange(len(module.weight)), layers=["conv", "flat"])
    assert last.removed == {"conv": (12, 13, 14, 15), "flat": (15, 16, 17, 18, 19)}
    assert last.whole["block.inner"] == "it was not asked for"
    assert shrink(model, X, layers=[nn.Conv2d, "flat"]).removed.keys() == {"block.inner", "conv", "flat"}
    assert shrink(model, X, layers="block.*").removed.keys() == {"block.inner"}
    with pytest.raises(SettingError, match=r"shape \(16,\)"):
        shrink(model, X, by=lambda module, name: torch.ones(3), layers="conv")


def test_a_ranking_of_all_layers_takes_what_is_least_and_leaves_one_channel() -> None:
    model = net()
    with torch.no_grad():
        model.conv.weight *= 1e-3
    found = shrink(model, X, 0.5, scope="global")
    assert sum(map(len, found.removed.values())) == 24 - 1  # all 16 of conv would have gone
    assert found.model.conv.out_channels == 1


def test_a_smaller_model_is_tuned_by_a_trainer_of_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    train = batches((x, (x[:, 0] > 0).long()), 20, shuffle=True, seed=0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    settings = {"metrics": {"accuracy": accuracy}, "console": False}
    Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss(), **settings).fit(train, epochs=5)
    small = shrink(model, x, 0.75).model
    tuned = Trainer(small, torch.optim.Adam(small.parameters(), 1e-2), nn.CrossEntropyLoss(), **settings)
    tuned.fit(train, epochs=5)
    assert small[0].out_features == 8 and tuned.evaluate(train)["val_accuracy"] > 0.9


def functional(x, model):
    x = F.max_pool2d(F.relu(model.conv(x), inplace=False), 2)
    return model.head(torch.flatten(F.dropout(x, 0.1, model.training), 1).relu())


def averaged(x, model):
    return model.last(F.adaptive_avg_pool2d(model.conv(x), 1).mean((2, 3)).reshape(x.shape[0], -1))


def normalised(x, model):
    return model.last(model.layer(model.conv(x).mean((2, 3))))


def grouped_norm(x, model):
    return model.last(model.group(model.conv(x)).mean((2, 3)))


def joined(x, model):
    x = model.conv(x)
    return model.head(torch.cat([x, x], 1).flatten(1)[:, :144])


def written(x, model):
    return model.head(model.conv(x).view(5, 144))


def softmax(x, model):
    return model.last(model.conv(x).softmax(1).mean((2, 3)))


def attention(x, model):
    x = model.conv(x).flatten(2).transpose(1, 2)
    return model.last(model.attention(x, x, x)[0].mean(1))


def summed(x, model):
    return model.one(model.conv(x).sum(1).flatten(1))


def repeated(x, model):
    return model.last((model.same(model.same(model.conv(x)))).mean((2, 3)))


class Any(nn.Module):
    def __init__(self, way=functional):
        super().__init__()
        self.way = way
        self.conv, self.head, self.last = nn.Conv2d(1, 4, 3, bias=False), nn.Linear(144, 3), nn.Linear(4, 3)
        if way is functional:
            self.head = nn.Linear(36, 3)
        self.layer, self.group, self.one = nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(36, 3)
        self.attention, self.same = nn.MultiheadAttention(4, 2, batch_first=True), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.way(x, self)


@pytest.mark.parametrize("way", [functional, averaged])
def test_functions_are_followed_as_modules_are(way) -> None:
    model = net(lambda: Any(way)).eval()
    small = remove_channels(model, X, {"conv": [1]}).model
    reader = model.head if way is functional else model.last
    with torch.no_grad():
        reader.weight[:, range(9, 18) if way is functional else [1]] = 0
    torch.testing.assert_close(small(X), model(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (normalised, r"go into layer \(LayerNorm\), which is not known"),
        (grouped_norm, r"go into group \(GroupNorm\), which is not known"),
        (joined, r"go into cat, which is not known"),
        (written, r"go into view, which is not known"),
        (softmax, r"go into softmax, which is not known"),
        (attention, r"go into flatten|mixed with other dimensions in flatten"),
        (summed, r"are added up in sum"),
        (repeated, r"same is called 2 times"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(way, said) -> None:
    with pytest.raises(SettingError, match=said):
        remove_channels(net(lambda: Any(way)), X, {"conv": [1]})


def shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model


def branching():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else x

    return Branching()


def masked():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    mask_weights(model, 0.5, layers="0")
    return model


def hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].register_forward_hook(lambda *_: None)
    return model


def reversed_by_a_hook(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
    model[1].register_forward_hook(lambda module, inputs, output: output.flip(-1))
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: reversed_by_a_hook(nn.ReLU()), "0: its channels pass 1, which has hooks"),
        (lambda: reversed_by_a_hook(nn.Sequential(nn.ReLU())), "0: its channels pass 1, which has hooks"),
        (shared, "0: 0 shares its weights; 2: 2 shares its weights"),
        (branching, "cannot follow the forward of Branching"),
        (masked, "0: the weight of 0 is computed from others"),
        (hooked, "2 has hooks"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
            "0: it is not called as a plain layer",
        ),
        (nn.ReLU, "no linear layer or convolution"),
    ],
)
def test_models_that_cannot_be_shrunk_are_refused(make, said) -> None:
    with pytest.raises(SettingError, match=said):
        shrink(make(), torch.randn(3, 4), 0.5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shrink(net(), X, 1.0), "above 0 and below 1"),
        (lambda: shrink(net(), X, scope="all"), '"layer" or "global"'),
        (lambda: shrink(net(), X, by="l2"), '"l1", "bn"'),
        (lambda: shrink(net(), X, multiple=0), "at least 1"),
        (lambda: shrink(net(), X, layers="stem"), "stem cannot lose channels: its channels meet"),
        (lambda: shrink(net(), X, layers=nn.ReLU), "means no module"),
        (lambda: remove_channels(net(), X, {"convs": [1]}), "'convs' is no linear layer or convolution"),
        (lambda: remove_channels(net(), X, {"conv": [16]}), "channels from 0 to 15"),
        (lambda: remove_channels(net(), X, {"conv": range(16)}), "no channel left"),
        (lambda: remove_channels(net(), {"pixels": X}, {"conv": [1]}), "cannot be called with this batch"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, said) -> None:
    with pytest.raises(SettingError, match=said):
        call()


def test_a_cut_that_changes_the_result_is_not_returned(monkeypatch) -> None:
    right = pruning._features
    monkeypatch.setattr(pruning, "_features", lambda channels, repeat: right(channels, repeat).flip(0))
    with pytest.raises(SettingError, match="does not compute what the bigger one does"):
        remove_channels(net(), X, {"conv": [1]})


def test_a_recomputed_model_is_shrunk_and_goes_on_recomputing() -> None:
    model = net()
    checkpoint_activations(model, Res)
    small = remove_channels(model, X, {"block.inner": [0]}).model
    assert "forward" in vars(small.block) and vars(small.block)["forward"].__self__.module is small.block


def test_a_hook_on_what_is_around_a_whole_path_is_no_matter() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    model[0].register_forward_hook(lambda module, inputs, output: output.flip(-1))
    assert remove_channels(model, torch.randn(3, 4), {"0.0": [1]}).model[0][0].out_features == 3


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_share_that_is_whole_is_not_rounded_down(scope) -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 2))
    assert len(shrink(model, torch.randn(3, 4), 0.58, scope=scope).removed["0"]) == 29  # 0.58 * 50 < 29
