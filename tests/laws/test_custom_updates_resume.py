"""Updates of users' own with the other slots: resumed in the middle, under autocast, with an average."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from trainwright import EMA, Checkpoint, OneCycle, StepLR, Trainer, Updates

from .models import assert_equal
from .own_updates import GAN, Closed, Scaled, Sharp, critic_loss, generator_loss, noise, pairs, points, run
from .test_custom_updates_sam import closed_twins, drawn, sharp_twins


class KilledError(Exception):
    """Ends a run in the middle."""


def check_resume(trainer, make, data, **settings):
    """Three epochs, killed before update 12 with a checkpoint of update 9, go on as if nothing had been."""
    with TemporaryDirectory() as directory:
        resumes(trainer, make, data, Path(directory), **settings)


def resumes(trainer, make, data, directory, **settings):
    class Killed(trainer):
        def update(self, window):
            if self.progress.updates == 11:
                raise KilledError
            return super().update(window)

    def fit(cls, name):
        pair = make()
        torch.manual_seed(3)
        slot = Checkpoint(directory / name, every=Updates(3))
        made = cls(*pair, settings.get("loss"), console=False, checkpoint=slot, **slots)
        return made, made.fit(data, epochs=3, resume="auto")

    slots = {name: value for name, value in settings.items() if name != "loss"}
    whole, reported = fit(trainer, "whole")
    with pytest.raises(KilledError):
        fit(Killed, "killed")
    resumed, again = fit(trainer, "killed")
    assert_equal(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    for name, optimizer in whole.optimizers.items():
        assert_equal(resumed.optimizers[name].state_dict(), optimizer.state_dict(), name)
    assert again.history == reported.history and again.updates == reported.updates == 21


class Cast(Trainer):
    """A GAN that computes as steps do under the precision."""

    def update(self, window):
        real = torch.cat([*window])
        with self.autocast():
            fake = self.model.G(noise(real))
            loss = critic_loss(self.model, real, fake)
        self.minimize(loss, "D")
        with self.autocast():
            loss = generator_loss(self.model, fake)
        self.minimize(loss, "G")


def test_a_gan_resumes_in_the_middle():
    """A GAN with two optimizers, their schedules, a clip and a loss scale."""
    schedule = {"G": OneCycle(max_lr=0.05), "D": StepLR(Updates(5), gamma=0.5)}
    settings = {"schedule": schedule, "clip": {"D": 0.3}, "precision": Scaled(2.0**40)}
    check_resume(GAN, lambda: pairs(norm=False)[0], points(), **settings)


def test_sam_resumes_in_the_middle():
    settings = {"schedule": OneCycle(max_lr=0.05), "loss": nn.CrossEntropyLoss()}
    check_resume(Sharp, lambda: sharp_twins("adamw")[0], drawn(), **settings)


@pytest.mark.parametrize("search", ["plain", "strong_wolfe"])
def test_lbfgs_resumes_in_the_middle(search):
    check_resume(Closed, lambda: closed_twins(search)[0], drawn(), loss=nn.CrossEntropyLoss())


def test_autocast_in_an_update_is_that_of_the_precision():
    """`autocast()` in an update of one's own is torch's of the precision."""
    theirs, ours = pairs(dtype=torch.float32)
    data = points(dtype=torch.float32)
    torch.manual_seed(3)
    model, optimizers = theirs
    for real in data * 3:
        with torch.autocast("cpu", torch.bfloat16):
            fake = model.G(noise(real))
            loss = critic_loss(model, real, fake)
        optimizers["D"].zero_grad()
        loss.backward()
        optimizers["D"].step()
        with torch.autocast("cpu", torch.bfloat16):
            loss = generator_loss(model, fake)
        optimizers["G"].zero_grad()
        loss.backward()
        optimizers["G"].step()
    torch.manual_seed(3)
    run(Cast, ours, data, epochs=3, precision="bf16")
    assert_equal(dict(ours[0].state_dict()), dict(model.state_dict()))


def test_an_average_is_taken_once_per_update_of_several_steps():
    """An average is taken once per update, however many steps are in it."""
    _, ours = pairs()
    held = []

    class Own(GAN):
        def after_update(self):
            held.append({name: value.clone() for name, value in self.model.state_dict().items()})

    run(Own, ours, points(), average=EMA(0.5, warmup=False))
    mean = held[0]
    for weights in held[1:]:
        mean = {name: 0.5 * value + 0.5 * weights[name] for name, value in mean.items()}
    assert len(held) == 7
    for name, value in ours[0].state_dict().items():
        torch.testing.assert_close(value, mean[name], rtol=1e-12, atol=0)
