"""Masked weights stay zero through training, averages, checkpoints and processes of pruning, by torch's own masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from trainwright import EMA, Checkpoint, SettingError, Trainer, batches, latest_checkpoint, load_weights, mask_weights


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    return batches(rows, 10)


def trainer_of(model, optimizer=None, **settings):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def zeros(model):
    return [int((model[i].weight == 0).sum()) for i in (0, 2)]


def test_the_smallest_weights_of_all_layers_are_masked_as_torch_masks_them() -> None:
    model, other = net(), net()
    masked = mask_weights(model, 0.4)
    pairs = [(other[0], "weight"), (other[2], "weight")]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.4)
    assert all(torch.equal(model[i].weight, other[i].weight) for i in (0, 2))
    assert (masked.zeros, masked.weights) == (58, 144)
    assert str(masked) == "58 of 144 weights masked in 2 layers"
    each = mask_weights(net(), 0.5, scope="layer")
    assert [int((m == 0).sum()) for m in each._masks()] == [48, 24]
    assert mask_weights(net(), 0.5, layers="2").names == ("2",)


def test_equal_weights_are_masked_by_count() -> None:
    model = nn.Linear(10, 10)
    nn.init.ones_(model.weight)
    assert mask_weights(model, 0.25).zeros == 25


def test_a_masked_model_trains_as_the_plain_loop_with_masked_gradients() -> None:
    model, other = net(), net()
    mask_weights(model, 0.5)
    masks = [(model[i].weight_mask.clone(), other[i].weight) for i in (0, 2)]
    trainer_of(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)).fit(data(), epochs=3)
    with torch.no_grad():
        for mask, weight in masks:
            weight.mul_(mask)
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        for x, y in data():
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            for mask, weight in masks:
                weight.grad.mul_(mask)
            optimizer.step()
    x = next(iter(data()))[0]
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("average", [None, EMA(0.5)])
def test_an_optimizer_that_was_made_before_goes_on(average) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trainer = trainer_of(model, optimizer, average=average)
    trainer.fit(data(), epochs=1)
    weight, before = model[0].weight, model[0].weight.detach().clone()
    masked = mask_weights(model, 0.5)
    assert model[0].weight_orig is weight and weight in optimizer.state
    trainer.fit(data(), data(), epochs=1)
    assert sum(zeros(model)) == masked.zeros == 72
    assert not torch.equal(model[0].weight_orig, before)
    mask_weights(model, 0.75)
    trainer.fit(data(), data(), epochs=1)
    masked.remove()
    masked.remove()
    assert sum(zeros(model)) == 108
    assert model[0].weight is weight and isinstance(model[0].weight, nn.Parameter)
    assert set(model.state_dict()) == set(net().state_dict())


def test_a_growing_share_stays_masked_where_it_was_and_a_smaller_one_is_refused() -> None:
    model = net()
    mask_weights(model, 0.3)
    first = model[0].weight_mask.clone()
    masked = mask_weights(model, 0.6)
    assert masked.zeros == 86
    assert not ((first == 0) & (model[0].weight_mask == 1)).any()
    with pytest.raises(SettingError, match=r"59\.7% are masked"):
        mask_weights(model, 0.5)


class Gradual(Trainer):
    def begin_epoch(self, epoch):
        mask_weights(self.model, (0.3, 0.5, 0.7)[epoch])


@pytest.mark.parametrize("average", [None, EMA(0.5)])
def test_masks_may_grow_while_a_fit_goes_on(average) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trainer = Gradual(model, optimizer, nn.CrossEntropyLoss(), console=False, average=average)
    trainer.fit(data(), data(), epochs=3)
    assert sum(zeros(model)) == 101


def test_a_checkpoint_of_a_masked_model_is_loaded_into_a_masked_one(tmp_path) -> None:
    model = net()
    mask_weights(model, 0.5)
    trainer_of(model, checkpoint=Checkpoint(tmp_path)).fit(data(), epochs=2)
    again = net(seed=1)
    mask_weights(again, 0.25)  # of other weights
    trainer_of(again, checkpoint=Checkpoint(tmp_path)).fit(data(), epochs=2, resume="auto")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    x = next(iter(data()))[0]
    assert torch.equal(again(x), model(x)) and sum(zeros(again)) == 72
    with pytest.raises(Exception, match="weight_orig"):
        load_weights(latest_checkpoint(tmp_path), net())


def test_a_frozen_or_recomputed_or_shared_weight() -> None:
    model = net()
    model[0].requires_grad_(False)
    mask_weights(model, 0.5)
    trainer_of(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)).fit(data(), epochs=1)
    assert not model[0].weight_orig.requires_grad
    tied = net()
    tied[2].weight = nn.Parameter(torch.randn(3, 16))
    tied.append(nn.Linear(16, 3))
    tied[3].weight = tied[2].weight
    with pytest.raises(SettingError, match="the weight of 2 is shared"):
        mask_weights(tied, 0.5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mask_weights(net(), 0), "above 0 and below 1"),
        (lambda: mask_weights(net(), 1), "above 0 and below 1"),
        (lambda: mask_weights(net(), 0.5, scope="all"), '"global" or "layer"'),
        (lambda: mask_weights(net(), 0.5, layers="3"), "means no module"),
        (lambda: mask_weights(nn.Sequential(nn.ReLU()), 0.5), "no linear layer or convolution"),
        (lambda: mask_weights(nn.Sequential(nn.LazyLinear(3)), 0.5), "has no shape yet"),
        (lambda: mask_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), 0.5), "computed from others"),
    ],
)
def test_what_cannot_be_masked_is_refused(call, said) -> None:
    with pytest.raises(SettingError, match=said):
        call()
