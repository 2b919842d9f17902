"""The laws Window and Plain with several named optimizers: GANs, WGAN-GP, and one loss that two optimizers share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import MeanLoss, NonFiniteError, OneCycle, StepLR, Trainer, Updates

from .models import assert_equal, distance
from .own_updates import (
    GAN,
    Scaled,
    assert_pairs,
    critic_loss,
    gan_by_hand,
    generator_loss,
    joined_rows,
    noise,
    pairs,
    points,
    run,
)
from .window_cases import UNEVEN, Smooth, draw, joined, masked, valid

EPOCHS = 8


def schedules_by_hand(optimizers, total):
    """OneCycle for the generator, steps for the critic: torch's own."""
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers["G"], max_lr=0.05, total_steps=total)
    return cycle, torch.optim.lr_scheduler.StepLR(optimizers["D"], 5, gamma=0.5)


def check_gan(k=1, *, precision=None):
    """Two optimizers with schedules and a clip of their own are the plain loop over whole batches, bit for bit."""
    theirs, ours = pairs()
    data = points()
    groups = joined_rows(data, k) * EPOCHS
    torch.manual_seed(3)
    by_hand, rates = [], []
    schedules = schedules_by_hand(theirs[1], len(groups))
    for group in groups:
        rates.append([theirs[1][name].param_groups[0]["lr"] for name in ("G", "D")])
        by_hand += gan_by_hand(*theirs, [group], clip=0.3, schedules=schedules)
    rng = torch.get_rng_state()
    torch.manual_seed(3)
    settings = {"clip": {"D": 0.3}, "schedule": {"G": OneCycle(max_lr=0.05), "D": StepLR(Updates(5), gamma=0.5)}}
    settings |= {"accumulate": k, "precision": precision}
    made, result, updates = run(GAN, ours, data, epochs=EPOCHS, **settings)
    assert_pairs(ours, theirs)
    assert torch.equal(rng, torch.get_rng_state())
    assert result.updates == len(updates) == made.progress.updates == len(groups)
    assert [[update.values["lr_G"], update.values["lr_D"]] for update in updates] == rates
    assert [list(update.lrs) for update in updates] == rates
    assert [update.values["loss_D"] for update in updates] == [reported["D"] for reported in by_hand]
    assert [update.values["loss_G"] for update in updates] == [reported["G"] for reported in by_hand]
    assert [update.values["grad_norm_D"] for update in updates] == [reported["norm"] for reported in by_hand]
    assert all("grad_norm_G" not in update.values for update in updates)
    assert any(reported["norm"] > 0.3 for reported in by_hand)


class Wasserstein(Trainer):
    """WGAN-GP: five critic steps with a gradient penalty, then one of the generator."""

    def update(self, window):
        real = torch.cat([*window])
        for _ in range(5):
            self.minimize(penalized(self.model, real), "D")
        self.minimize(-self.model.D(self.model.G(noise(real))).mean(), "G")


def penalized(model, real):
    """The critic's loss, with the penalty on its gradient between real and generated points."""
    fake = model.G(noise(real)).detach()
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model.D(between).sum(), between, create_graph=True)
    return model.D(fake).mean() - model.D(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def check_wasserstein(k=1, precision=None):
    """A penalty that is differentiated twice, and five steps of the critic to one of the generator."""
    theirs, ours = pairs()
    data = points()
    torch.manual_seed(3)
    model, optimizers = theirs
    reported = []
    for real in joined_rows(data, k) * 3:
        critic = []
        for _ in range(5):
            optimizers["D"].zero_grad()
            loss = penalized(model, real)
            loss.backward()
            optimizers["D"].step()
            critic.append(loss.item())
        optimizers["G"].zero_grad()
        loss = -model.D(model.G(noise(real))).mean()
        loss.backward()
        optimizers["G"].step()
        reported.append((sum(critic) / 5, loss.item()))
    torch.manual_seed(3)
    _, result, updates = run(Wasserstein, ours, data, epochs=3, accumulate=k, precision=precision)
    assert_pairs(ours, theirs)
    assert result.updates == len(updates) == len(reported)
    assert [update.values["loss_D"] for update in updates] == pytest.approx(
        [critic for critic, _ in reported], rel=1e-14
    )
    assert [update.values["loss_G"] for update in updates] == [loss for _, loss in reported]


def shared(dtype=torch.float64):
    """A model in two halves, each with an optimizer, twice."""
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        model = Smooth().to(dtype)
        optimizers = {
            "G": torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9),
            "D": torch.optim.AdamW(model.second.parameters(), lr=0.01),
        }
        made.append((model, optimizers))
    return made


def shared_by_hand(model, optimizers, loss_of, data, *, clip=None, order=("G", "D")):
    """One backward, two optimizers; returns losses and the clipped one's norms."""
    losses, norms = [], []
    for x, y in data:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.second.parameters(), clip).item())
        for name in order:
            optimizers[name].step()
        losses.append(loss.item())
    return losses, norms


class Each(Trainer):
    """One loss, and each optimizer applied by itself."""

    def update(self, window):
        loss = self.compute_gradients(window)
        self.apply_gradients("G")
        self.apply_gradients("D")
        return loss


def check_shared(trainer, k=1, precision=None):
    """Two optimizers of one loss, one after the other or both at once, are the plain loop's two steps."""
    theirs, ours = shared()
    data = draw(replace(UNEVEN, k=k), "classes")
    groups = [joined(data[i : i + k], ()) for i in range(0, len(data), k)] * EPOCHS
    losses, norms = shared_by_hand(*theirs, F.cross_entropy, groups, clip=0.1)
    settings = {"accumulate": k, "clip": {"D": 0.1}, "precision": precision, "loss": nn.CrossEntropyLoss()}
    data = data if k > 1 else groups[: len(data)]
    _, result, updates = run(trainer, ours, data, epochs=EPOCHS, **settings)
    assert result.updates == len(groups) == len(updates)
    if k == 1:
        assert_pairs(ours, theirs)
        assert [update.loss for update in updates] == losses
        assert [update.values["grad_norm_D"] for update in updates] == norms
    else:
        assert distance(ours[0], theirs[0]) <= 1e-12
        assert [update.loss for update in updates] == pytest.approx(losses, rel=1e-12)
        assert [update.values["grad_norm_D"] for update in updates] == pytest.approx(norms, rel=1e-12)


class Named(Each):
    """The same with a dict of losses over the targets that count."""

    def training_step(self, batch):
        output, target = self.model(batch[0]), batch[1]
        return {
            "fit": MeanLoss(masked(output, target), valid(target)),
            "size": MeanLoss(sizes(output, target), valid(target)),
        }


def sizes(output, target):
    """A second loss, a mean over the same targets."""
    return (output.square().sum(1) * (target >= 0)).sum() / max(valid(target), 1)


def check_named(k=3):
    """Named losses in an update of one's own: their sum is trained by shares, each is reported as its exact mean."""
    theirs, ours = shared()
    data = draw(replace(UNEVEN, k=k), "classes")
    groups = [joined(data[i : i + k], ()) for i in range(0, len(data), k)]
    reported, losses = [], []

    def loss_of(output, y):
        reported.append((masked(output, y).item(), sizes(output, y).item()))
        return masked(output, y) + sizes(output, y)

    losses, _ = shared_by_hand(*theirs, loss_of, groups * EPOCHS)
    _, result, updates = run(Named, ours, data, epochs=EPOCHS, accumulate=k)
    assert distance(ours[0], theirs[0]) <= 1e-12
    assert [update.loss for update in updates] == pytest.approx(losses, rel=1e-12)
    assert [update.values["fit"] for update in updates] == pytest.approx([fit for fit, _ in reported], rel=1e-12)
    assert [update.values["size"] for update in updates] == pytest.approx([size for _, size in reported], rel=1e-12)
    counts = [valid(y) for _, y in groups]
    for name, at in (("fit", 0), ("size", 1)):
        mean = sum(one[at] * n for one, n in zip(reported[: len(groups)], counts, strict=True)) / sum(counts)
        assert result.history[0][name] == pytest.approx(mean, rel=1e-12)


class Counted(Trainer):
    """A GAN whose points come from the real ones too, and that takes down in its state the windows it has seen."""

    def update(self, window):
        real = torch.cat([*window])
        self.state["windows"] = self.state.get("windows", 0) + 1
        fake = self.model.G(noise(real) + 0 * real.sum())
        self.minimize(critic_loss(self.model, real, fake), "D")
        assert self.state["windows"] > 0  # it is put back at the update's end, not in the middle
        self.minimize(generator_loss(self.model, fake), "G")


@pytest.mark.parametrize("precision", [None, Scaled()], ids=["plain", "scaled"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_gan_is_its_plain_loop_with_schedules_and_a_clip_of_its_own(k, precision):
    check_gan(k, precision=precision)


def test_the_losses_of_each_optimizer_are_reported_as_means_over_all_rows(k=3):
    """The epoch's losses of each optimizer are means over all rows; `loss` is their sum; rates are reported by name."""
    theirs, ours = pairs()
    data = points()
    torch.manual_seed(3)
    by_hand = gan_by_hand(*theirs, joined_rows(data, k))
    torch.manual_seed(3)
    _, result, _ = run(GAN, ours, data, accumulate=k)
    rows = [len(group) for group in joined_rows(data, k)]
    means = {
        name: sum(reported[name] * n for reported, n in zip(by_hand, rows, strict=True)) / sum(rows)
        for name in ("D", "G")
    }
    (row,) = result.history
    assert row["loss_D"] == pytest.approx(means["D"], rel=1e-14)
    assert row["loss_G"] == pytest.approx(means["G"], rel=1e-14)
    assert row["loss"] == pytest.approx(means["D"] + means["G"], rel=1e-14)
    assert (row["lr_G"], row["lr_D"], "lr" in row) == (0.02, 0.01, False)


@pytest.mark.parametrize("precision", [None, Scaled()], ids=["plain", "scaled"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_gradient_penalty_and_five_critic_steps_are_the_plain_loops(k, precision):
    check_wasserstein(k, precision)


@pytest.mark.parametrize("precision", [None, Scaled()], ids=["plain", "scaled"])
@pytest.mark.parametrize("trainer", [Trainer, Each])
@pytest.mark.parametrize("k", [1, 3])
def test_two_optimizers_of_one_loss_are_the_plain_loops_two_steps(trainer, k, precision):
    check_shared(trainer, k, precision)


@pytest.mark.parametrize("k", [1, 3])
def test_named_losses_in_an_update_of_ones_own_are_weighed_and_reported_exactly(k):
    check_named(k)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_window_of_a_gan_changes_no_weight(policy):
    """A bad window: neither optimizer steps, and where it is left out the state and the statistics are put back."""
    theirs, ours = pairs(norm=True)
    data = points((4, 3, 6, 2, 3, 5, 2))
    torch.manual_seed(3)
    gan_by_hand(*theirs, data[:3])
    weights = {name: value.clone() for name, value in theirs[0].state_dict().items()}
    noise(data[3])  # drawn before it turns out to be bad
    gan_by_hand(*theirs, data[4:])
    data[3] = data[3] * torch.nan
    torch.manual_seed(3)
    made = Counted(*ours, on_nonfinite=policy, console=False)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"^update 4: the loss"):
            made.fit(data, epochs=1)
        assert_equal(dict(ours[0].state_dict()), weights)
        return
    result = made.fit(data, epochs=1)
    assert (result.updates, result.skipped, made.state["windows"]) == (6, 1, 6)
    assert_pairs(ours, theirs)


@pytest.mark.parametrize("bad", ["D", "G"])
def test_an_optimizer_with_a_bad_loss_is_held_back_alone(bad):
    """One optimizer whose loss is bad is held back alone; the other's step makes the window an update."""
    theirs, ours = pairs()
    data, torn = points(), 2

    class Own(GAN):
        def update(self, window):
            real = torch.cat([*window])
            fake = self.model.G(noise(real))
            at = torch.nan if self.progress.batch == torn else 1.0
            applied = [
                self.minimize(critic_loss(self.model, real, fake) * (at if bad == "D" else 1.0), "D"),
                self.minimize(generator_loss(self.model, fake) * (at if bad == "G" else 1.0), "G"),
            ]
            assert applied == [at == 1.0 or bad == "G", at == 1.0 or bad == "D"]

    torch.manual_seed(3)
    for index, real in enumerate(data):
        held = {name: optimizer.step for name, optimizer in theirs[1].items()}
        if index == torn:
            theirs[1][bad].step = lambda: None
        gan_by_hand(*theirs, [real])
        theirs[1][bad].step = held[bad]
    torch.manual_seed(3)
    _, result, updates = run(Own, ours, data, on_nonfinite="skip")
    assert_pairs(ours, theirs)
    assert (result.updates, result.skipped, len(updates)) == (len(data), 0, len(data))
    assert updates[torn].values[f"loss_{bad}"] != updates[torn].values[f"loss_{bad}"] and not updates[torn].skipped
