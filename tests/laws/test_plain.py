"""The Plain law: with every part off, and with the parts that torch has too, it is the plain loop bit for bit."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import ClipNorm, ClipValue, Epochs, MixedPrecision, StepLR, StepOutput, SumLoss, Trainer

from .models import Tied, assert_twins, build, ready, tensors
from .plain_loops import EPOCHS, by_hand, by_trainer, cast


def mean_of_epoch(losses, data, epoch, counts=None):
    """The mean over what each loss is a mean over."""
    counts = [y.numel() for _, y in data] if counts is None else counts
    total = 0.0
    for loss, count in zip(losses[epoch * len(data) :], counts, strict=False):
        total += loss * count
    return total / sum(counts)


def check_loop(kind="mlp", optimizer="sgd", precision=None):
    """Parameters, buffers, optimizer state, losses of updates and epochs, RNG."""
    data = ready(kind)
    theirs, ours = build(kind, optimizer), build(kind, optimizer)
    expected, rng = by_hand(*theirs, F.cross_entropy, data, precision=precision)
    _, result, losses, our_rng = by_trainer(*ours, nn.CrossEntropyLoss(), data, precision=precision)
    assert losses == expected
    assert [row["loss"] for row in result.history] == [mean_of_epoch(losses, data, e) for e in range(EPOCHS)]
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)


def check_sum(kind="mlp"):
    """`reduction="sum"`: trained as it is, reported per row."""
    data = ready(kind, size=2, rows=12)
    theirs, ours = build(kind), build(kind)
    expected, _ = by_hand(*theirs, partial(F.cross_entropy, reduction="sum"), data)
    _, result, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(reduction="sum"), data)
    assert_twins(ours, theirs)
    assert losses == [loss / 2 for loss in expected]
    assert result.history[0]["loss"] == sum(expected[:6]) / 12


class OwnStep(Trainer):
    """Two forward passes, a penalty, a loss of its own."""

    def training_step(self, batch):
        x, y = batch
        output = self.model(x)
        loss = penalised(output, y) + 0.1 * self.model(x).square().mean()
        return StepOutput(loss, output, y)


def penalised(output, y):
    return F.cross_entropy(output, y, label_smoothing=0.1) + 0.01 * output.abs().mean()


def check_own_step(precision=None):
    data = ready("mlp")
    theirs, ours = build("mlp", "adamw"), build("mlp", "adamw")
    torch.manual_seed(3)
    expected = []
    for _ in range(EPOCHS):
        for x, y in data:
            theirs[1].zero_grad()
            with cast(precision):
                loss = penalised(theirs[0](x), y) + 0.1 * theirs[0](x).square().mean()
            loss.backward()
            theirs[1].step()
            expected.append(loss.item())
    rng = torch.get_rng_state()
    _, _, losses, our_rng = by_trainer(*ours, None, data, trainer=OwnStep, precision=precision)
    assert losses == expected
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)


def loader(kind, generator=None):
    return DataLoader(TensorDataset(*tensors(kind, 44)), batch_size=8, shuffle=True, generator=generator)


def check_loader(own_generator=False):
    """A shuffled loader draws what it draws in the plain loop, from the global RNG or from its own generator."""
    theirs, ours = build("mlp"), build("mlp")
    generators = [torch.Generator().manual_seed(8) if own_generator else None for _ in range(2)]
    expected, rng = by_hand(*theirs, F.cross_entropy, loader("mlp", generators[0]))
    _, _, losses, our_rng = by_trainer(*ours, nn.CrossEntropyLoss(), loader("mlp", generators[1]))
    assert losses == expected
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)
    if own_generator:
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


def check_clip(clip=None, hand=None, precision=None):
    clip = ClipNorm(0.5) if clip is None else clip
    hand = (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)) if hand is None else hand
    data = ready("mlp")
    theirs, ours = build("mlp"), build("mlp")
    norms = []
    expected, rng = by_hand(
        *theirs, F.cross_entropy, data, precision=precision, between=lambda model: norms.append(hand(model))
    )
    trainer, _, losses, our_rng = by_trainer(*ours, nn.CrossEntropyLoss(), data, clip=clip, precision=precision)
    assert losses == expected
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)
    seen = [update.grad_norm for update in trainer.observers[-1].updates]
    assert seen == [None if norm is None else norm.item() for norm in norms]
    if norms[0] is not None:
        assert sum(norm > 0.5 for norm in norms) > 5


class Weighted(Trainer):
    """Rows come with the factor of their batch, by which an overflow is planted."""

    def training_step(self, batch):
        x, (y, factor) = batch
        return F.cross_entropy(self.model(x), y) * factor


def check_fp16(clip=None, kind="mlp", init_scale=2.0**13):
    """torch's GradScaler: weights, scale, skipped updates; BatchNorm and RNG advance in an update that is skipped."""
    data = [(x, (y, 1e5 if index == 4 else 1.0)) for index, (x, y) in enumerate(ready(kind))]
    theirs, ours = build(kind), build(kind)
    model, optimizer = theirs
    torch.manual_seed(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    losses, skipped, scales = [], [], []
    for _ in range(11):
        for x, (y, factor) in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y) * factor
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
            scales.append(before)
            losses.append(loss.item())
    rng = torch.get_rng_state()
    precision = MixedPrecision("fp16", init_scale=init_scale, growth_interval=3)
    found = []

    class Watched(Weighted):
        def training_step(self, batch):
            found.append(self._run.scaler.value)
            return super().training_step(batch)

    trainer, result, our_losses, our_rng = by_trainer(
        *ours, None, data, trainer=Watched, precision=precision, clip=clip, epochs=11
    )
    assert 3 <= sum(skipped) <= 15 and any(a < b for a, b in pairwise(scales))
    assert found == scales and our_losses == losses
    assert [update.skipped for update in trainer.observers[-1].updates] == skipped
    assert result.skipped == sum(skipped) and result.updates == len(losses) - sum(skipped)
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)


def check_sparse(optimizer="sgd"):
    """Sparse gradients stay as torch leaves them, tokens that occur twice in a batch included."""
    pairs = []
    for _ in range(2):
        model, dense = build(Tied, sparse=True)
        if optimizer == "sparse adam":
            model.mix.requires_grad_(False)
            model.head.requires_grad_(False)
            pairs.append((model, torch.optim.SparseAdam([model.embedding.weight], lr=0.01)))
        else:
            dense.param_groups[0]["momentum"] = 0.0
            pairs.append((model, dense))
    data, (theirs, ours) = ready("tied"), pairs
    expected, _ = by_hand(*theirs, F.cross_entropy, data)
    _, _, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(), data)
    assert losses == expected
    assert_twins(ours, theirs)


def check_groups(optimizer=torch.optim.SGD):
    """Groups with rates of their own, one of them without decay, one frozen parameter."""
    pairs = []
    for _ in range(2):
        model, _ = build("cnn")
        model.conv.bias.requires_grad_(False)
        groups = [
            {"params": model.conv.parameters(), "lr": 0.1},
            {"params": model.norm.parameters(), "weight_decay": 0.0},
            {"params": model.head.parameters()},
        ]
        pairs.append((model, optimizer(groups, lr=0.02, weight_decay=0.01)))
    data, (theirs, ours) = ready("cnn"), pairs
    expected, _ = by_hand(*theirs, F.cross_entropy, data)
    _, _, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(), data)
    assert losses == expected
    assert_twins(ours, theirs)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied"])
def test_everything_off_is_the_plain_loop_bit_for_bit(kind, optimizer, precision):
    check_loop(kind, optimizer, precision)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_loss_that_is_a_sum_is_trained_as_it_is(kind):
    check_sum(kind)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_training_step_of_the_users_own_is_the_plain_loop(precision):
    check_own_step(precision)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_shuffled_loader_draws_what_the_plain_loop_draws(own_generator):
    check_loader(own_generator)


def test_a_frozen_batchnorm_stays_in_eval_mode():
    """A BatchNorm in eval mode, without gradients, keeps its mode and its statistics."""
    pairs = [build("cnn", "adamw"), build("cnn", "adamw")]
    for model, _ in pairs:
        model.norm.eval().requires_grad_(False)
        model.norm.running_mean.fill_(0.1)
    data, theirs, ours = ready("cnn"), *pairs
    expected, _ = by_hand(*theirs, F.cross_entropy, data)
    _, _, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(), data, val=ready("cnn", 20, seed=9))
    assert losses == expected
    assert not ours[0].norm.training and ours[0].training and int(ours[0].norm.num_batches_tracked) == 0
    assert_twins(ours, theirs)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_clipping_by_norm_is_torchs(precision):
    check_clip(precision=precision)


def test_clipping_by_another_norm_is_torchs():
    check_clip(
        ClipNorm(0.5, norm_type=1.0), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1.0)
    )


def test_clipping_by_value_is_torchs():
    check_clip(ClipValue(0.02), lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.02))


def test_a_rate_per_epoch_is_torchs():
    data = ready("mlp")
    theirs, ours = build("mlp"), build("mlp")
    scheduler = torch.optim.lr_scheduler.StepLR(theirs[1], 2, gamma=0.5)
    expected, _ = by_hand(*theirs, F.cross_entropy, data, after=scheduler.step)
    trainer, _, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(), data, schedule=StepLR(Epochs(2), gamma=0.5))
    assert losses == expected
    for group in (*theirs[1].param_groups, *ours[1].param_groups):  # torch's scheduler is one step further at the end
        group.pop("initial_lr", None)
        group["lr"] = None
    assert_twins(ours, theirs)
    rates = [update.lr for update in trainer.observers[-1].updates]
    assert rates == [0.05 * 0.5 ** (epoch // 2) for epoch in range(EPOCHS) for _ in data]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_fp16_is_torchs_grad_scaler(kind, clip):
    check_fp16(clip, kind)


def test_float64_is_the_plain_loop():
    data = [(x, y) for x, y in ready("mlp", dtype=torch.float64)]
    theirs, ours = build("mlp", "adamw", dtype=torch.float64), build("mlp", "adamw", dtype=torch.float64)
    expected, _ = by_hand(*theirs, F.cross_entropy, data)
    _, _, losses, _ = by_trainer(*ours, nn.CrossEntropyLoss(), data)
    assert losses == expected and ours[0].layers[0].weight.dtype == torch.float64
    assert_twins(ours, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "sparse adam"])
def test_sparse_gradients_are_the_plain_loop(optimizer):
    check_sparse(optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_groups_are_the_plain_loop(optimizer):
    check_groups(optimizer)


def test_a_step_that_returns_a_sum_with_a_count_trains_the_quotient():
    data = ready("mlp")

    class Summed(Trainer):
        def training_step(self, batch):
            x, y = batch
            return SumLoss(F.cross_entropy(self.model(x), y, reduction="sum"), y.numel())

    theirs, ours = build("mlp"), build("mlp")
    expected, _ = by_hand(*theirs, lambda output, y: F.cross_entropy(output, y, reduction="sum") / y.numel(), data)
    _, _, losses, _ = by_trainer(*ours, None, data, trainer=Summed)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_twins(ours, theirs)
