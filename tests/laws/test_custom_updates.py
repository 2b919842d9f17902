"""Updates of users' own under a loss scale, and with a backward or a step written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import StepError, Trainer

from .models import assert_equal
from .own_updates import (
    GAN,
    Scaled,
    assert_pairs,
    critic_loss,
    gan_by_hand,
    generator_loss,
    noise,
    numbers,
    pairs,
    points,
    run,
)
from .test_custom_updates_gan import shared, shared_by_hand
from .window_cases import twins

HUGE = 2.0**126
"""A loss scale under which a gradient of the critic overflows float32 where one of the generator does not."""


class Written(Trainer):
    """A backward of one's own, and the library's step."""

    def update(self, window):
        (batch,) = window
        self.optimizer.zero_grad()
        loss = self.training_step(batch)
        loss.backward()
        self.apply_gradients()
        return loss


def check_written(clip=None):
    """A hand-written backward with `apply_gradients` is the plain loop, bit for bit."""
    theirs, ours = twins("adamw")
    losses = []
    for x, y in numbers() * 8:
        theirs[1].zero_grad()
        loss = F.mse_loss(theirs[0](x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs[0].parameters(), clip)
        theirs[1].step()
        losses.append(loss.item())
    _, result, updates = run(Written, ours, numbers(), epochs=8, loss=nn.MSELoss(), clip=clip)
    assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
    assert_equal(ours[1].state_dict()["state"], theirs[1].state_dict()["state"])
    assert [update.loss for update in updates] == losses and result.updates == len(losses)


def refused(trainer, pair, data, text):
    """The Trainer refuses to go on with this error, before a weight has moved."""
    before = {name: value.clone() for name, value in pair[0].state_dict().items()}
    with pytest.raises(StepError, match=text):
        run(trainer, pair, data, loss=nn.MSELoss(), precision=Scaled())
    return before


class HalfWritten(Trainer):
    """The critic by `minimize`, the generator by hand."""

    def update(self, window):
        real = torch.cat([*window])
        fake = self.model.G(noise(real))
        self.minimize(critic_loss(self.model, real, fake), "D")
        self.optimizers["G"].zero_grad()
        generator_loss(self.model, fake).backward()
        self.apply_gradients("G")


class Steps(Trainer):
    """One of two optimizers steps by hand."""

    def update(self, window):
        loss = self.compute_gradients(window)
        self.apply_gradients("G")
        self.optimizers["D"].step()
        return loss


class StepsAlone(Trainer):
    """Both step by hand."""

    def update(self, window):
        loss = self.compute_gradients(window)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss


def test_the_scale_adapts_once_per_update_and_an_overflow_holds_back_its_own_step():
    """The scale adapts once per update to all of its steps; one that overflows is held back alone: as in torch."""
    theirs, ours = pairs(dtype=torch.float32)
    data = [30 * batch for batch in points(dtype=torch.float32)]
    precision = Scaled(HUGE)
    scaler = torch.amp.GradScaler("cpu", init_scale=HUGE, growth_interval=4)
    torch.manual_seed(3)
    scales, held = [], []
    for real in data * 4:
        before = [optimizer.state_dict()["state"].get(0, {}).get("step", 0) for optimizer in theirs[1].values()]
        before = [int(step) for step in before]
        gan_by_hand(*theirs, [real], scaler=scaler)
        after = [int(one.state_dict()["state"].get(0, {}).get("step", 0)) for one in theirs[1].values()]
        held.append([then == now for then, now in zip(before, after, strict=True)])
        scales.append(scaler.get_scale())
    torch.manual_seed(3)
    seen = []

    class Own(GAN):
        def update(self, window):
            seen.append(precision.scalers[-1].value)
            super().update(window)

    _, result, updates = run(Own, ours, data, epochs=4, precision=precision)
    assert_pairs(ours, theirs)
    assert [*seen[1:], precision.scalers[-1].value] == scales
    assert [update.skipped for update in updates] == [all(one) for one in held]
    assert result.skipped == sum(all(one) for one in held) and result.updates + result.skipped == len(held)
    assert any(one[0] != one[1] for one in held)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_hand_written_backward_is_the_plain_loop(clip):
    check_written(clip)


def test_a_hand_written_backward_is_refused_under_a_loss_scale():
    """Under a loss scale a hand-written backward is refused, by the line to write in its place."""
    _, ours = twins()
    before = refused(Written, ours, numbers(), r"self\.minimize\(loss\), or self\.compute_gradients\(window\)")
    assert_equal(dict(ours[0].state_dict()), before)


def test_a_hand_written_backward_beside_minimize_is_refused_under_a_loss_scale():
    """It is refused beside a `minimize` that was scaled, too: the weights of its optimizer have not moved."""
    _, ours = pairs()
    before = refused(HalfWritten, ours, points(), "backward\\(\\) of your own")
    assert_equal(dict(ours[0].G.state_dict()), {k[2:]: v for k, v in before.items() if k.startswith("G.")})


@pytest.mark.parametrize("trainer", [Steps, StepsAlone])
def test_a_step_by_hand_is_the_plain_loops_and_is_counted(trainer):
    """A step by hand is the plain loop's, and it is counted, once per update."""
    theirs, ours = shared()
    losses, _ = shared_by_hand(*theirs, F.mse_loss, numbers() * 8)
    _, result, updates = run(trainer, ours, numbers(), epochs=8, loss=nn.MSELoss())
    assert_pairs(ours, theirs)
    assert [update.loss for update in updates] == losses
    assert (result.updates, result.skipped) == (len(losses), 0)


def test_a_step_by_hand_beside_one_that_is_held_back_is_an_update():
    """An update in which a step by hand was made counts, although the other optimizer was held back."""
    _, ours = pairs()

    class Own(Trainer):
        def update(self, window):
            real = torch.cat([*window])
            fake = self.model.G(noise(real))
            self.optimizers["D"].zero_grad()
            critic_loss(self.model, real, fake).backward()
            self.optimizers["D"].step()
            self.minimize(generator_loss(self.model, fake) * torch.nan, "G")

    _, result, updates = run(Own, ours, points(), on_nonfinite="skip")
    assert (result.updates, result.skipped) == (7, 0) and not any(update.skipped for update in updates)


def test_a_step_by_hand_is_refused_under_a_loss_scale():
    """Under a loss scale a step by hand is refused: nobody has looked whether its gradient overflowed."""
    _, ours = shared()
    refused(StepsAlone, ours, numbers(), r"step\(\) of your own(.|\n)*apply_gradients")
