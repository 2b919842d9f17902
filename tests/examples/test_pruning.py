"""`pruning.py` keeps its promises: masks are exact and stay, and a network without channels computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from trainwright import EMA, Trainer, batches


def net(*, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    torch.manual_seed(5)
    return batches((torch.randn(32, 6), torch.randint(3, (32,))), 8)


def zeros(model):
    return sum(int((layer.weight == 0).sum()) for layer in model if isinstance(layer, nn.Linear))


def test_the_smallest_weights_of_all_layers_are_masked_as_torch_masks_them(example) -> None:
    ours, torchs = net(), net()
    example.mask_weights(ours, 0.5)
    layers = [(torchs[0], "weight"), (torchs[2], "weight")]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.5)
    assert torch.equal(ours[0].weight, torchs[0].weight) and torch.equal(ours[2].weight, torchs[2].weight)
    assert zeros(ours) == 72


def test_a_growing_share_stays_masked_where_it_was_and_a_smaller_one_is_refused(example) -> None:
    model = net()
    example.mask_weights(model, 0.3)
    first = model[0].weight_mask.clone()
    example.mask_weights(model, 0.6)
    assert zeros(model) == 86
    assert not ((first == 0) & (model[0].weight_mask == 1)).any()
    for amount in (0.5, 0, 1):
        with pytest.raises(ValueError, match="no less than is masked"):
            example.mask_weights(model, amount)


@pytest.mark.parametrize("average", [None, EMA(0.5)])
def test_a_masked_model_is_copied_and_trained_by_the_optimizer_that_it_had(example, average) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), average=average, console=False)
    trainer.fit(data(), epochs=1)
    weight = model[0].weight
    example.mask_weights(model, 0.5)
    copy.deepcopy(model)  # which torch's prune refuses before a forward without gradients
    assert model[0].weight_orig is weight and weight in optimizer.state
    trainer.fit(data(), data(), epochs=1)
    example.mask_weights(model, 0.75)
    trainer.fit(data(), data(), epochs=1)
    example.remove_masks(model)
    example.remove_masks(model)
    assert zeros(model) == 108 and model[0].weight is weight
    assert set(model.state_dict()) == set(net().state_dict())


def convolutional():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    head = [nn.Flatten(), nn.BatchNorm1d(6 * 16), nn.Linear(6 * 16, 10), nn.BatchNorm1d(10), nn.Linear(10, 4)]
    model = nn.Sequential(block, nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.Tanh(), nn.MaxPool2d(2), *head)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.running_mean)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_the_small_network_computes_what_the_big_one_does_with_its_readers_at_zero(example, training) -> None:
    model = convolutional().train(training)
    state = copy.deepcopy(model.state_dict())
    small = example.remove_channels(model, {0: [1, 5], 3: [0, 2], 8: [9]}).train(training)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    images = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        model[1].weight[:, [1, 5]] = 0
        model[6].weight[:, [*range(16), *range(32, 48)]] = 0
        model[8].weight[:, [9]] = 0
        torch.testing.assert_close(small(images), model(images), rtol=1e-4, atol=1e-5)
    assert (small[0].out_channels, small[3].in_channels, small[8].in_features, small[8].out_features) == (6, 6, 64, 9)
    small(images).sum().backward()


def test_each_layer_loses_its_share_of_the_least_channels(example) -> None:
    model = convolutional()
    by_weight, by_scale = example.shrink(model, 0.5), example.shrink(model, 0.5, by="bn")
    assert [by_weight[place].weight.shape[0] for place in (0, 3, 8, 10)] == [4, 3, 5, 4]
    assert [by_scale[place].weight.shape[0] for place in (0, 3, 8, 10)] == [4, 6, 5, 4]  # 3 has no norm of its width
    least = model[0][1].weight.abs().argsort()[4:].sort().values
    assert torch.equal(by_scale[0].bias, model[0][0].bias[least])
    assert example.shrink(nn.Sequential(nn.Linear(2, 50), nn.Linear(50, 1)), 0.58)[0].out_features == 21


@pytest.mark.parametrize(
    "between",
    [
        lambda: [nn.Conv2d(4, 4, 1, groups=2)],
        lambda: [nn.LayerNorm([4, 8, 8])],
        lambda: [nn.Linear(8, 8)],
        lambda: [(twice := nn.Conv2d(4, 4, 1)), nn.ReLU(), twice],
    ],
)
def test_channels_that_cannot_be_removed_stay_and_are_refused_by_place(example, between) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), *between(), nn.Flatten(), nn.Linear(256, 2))
    assert example.shrink(model, 0.5)[0].out_channels == 4
    for place in (0, len(model) - 1):
        with pytest.raises(ValueError, match="must keep their channels"):
            example.remove_channels(model, {place: [0]})


def test_a_layer_without_a_channel_is_refused(example) -> None:
    for channels in (range(16), [16]):
        with pytest.raises(ValueError, match="some of the 16 channels, not all"):
            example.remove_channels(net(), {0: channels})


def test_the_small_network_is_trained_by_a_trainer_of_its_own(example) -> None:
    small = example.shrink(net(), 0.5)
    before = small[0].weight.detach().clone()
    Trainer(small, torch.optim.SGD(small.parameters(), 0.1), nn.CrossEntropyLoss(), console=False).fit(data(), epochs=1)
    assert small[0].weight.shape == (8, 6) and not torch.equal(small[0].weight, before)
