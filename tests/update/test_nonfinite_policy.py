"""What becomes of an update whose loss or gradient is not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from records import Records
from trainwright import MixedPrecision, NonFiniteError, SettingError, Trainer


class Poisoned(Trainer):
    """Makes the loss, or only the gradient, of one update non-finite."""

    at, kind = 3, "loss"

    def update(self, window):
        if self.progress.updates + self.progress.skipped == self.at:
            self.before = snapshot(self)
        return super().update(window)

    def training_step(self, batch):
        loss = self.loss(self.model(batch[0]), batch[1])
        if self.progress.updates + self.progress.skipped != self.at:
            return loss
        if self.kind == "loss":
            return loss * math.nan
        weight = self.model[0].weight
        return loss + torch.sqrt((weight - weight.detach()).sum())  # 0, with an infinite slope


class GradientOnly(Poisoned):
    kind = "gradient"


def snapshot(trainer):
    return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()["state"]))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def data():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(6)]


def make(cls=Poisoned, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return cls(model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), console=False, **settings)


@pytest.mark.parametrize("cls", [Poisoned, GradientOnly])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_raise_leaves_weights_optimizer_and_statistics_as_before_and_names_the_update(cls, accumulate):
    class Here(cls):
        at = 2

    trainer = make(Here, accumulate=accumulate, clip=1.0)
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(data(), epochs=1)
    text = str(caught.value)
    assert "update 3: the " + cls.kind in text
    assert "learning rate 0.01" in text
    assert "loss nan" in text if cls is Poisoned else "loss 1" in text or "loss 0" in text
    assert "gradient norm" in text
    assert same(trainer.before, snapshot(trainer))
    assert trainer.progress.updates == 2
    assert trainer.result.stopped.startswith("NonFiniteError")


def test_without_clip_the_error_has_no_norm():
    with pytest.raises(NonFiniteError) as caught:
        make().fit(data(), epochs=1)
    assert "norm" not in str(caught.value)


@pytest.mark.parametrize("cls", [Poisoned, GradientOnly])
def test_skip_holds_back_one_update_and_trains_on_as_if_its_batch_were_not_there(cls):
    reported = Records()
    trainer = make(cls, on_nonfinite="skip", observers=[reported])
    result = trainer.fit(data(), epochs=1)
    assert (result.updates, result.skipped) == (5, 1)
    assert [update.skipped for update in reported.updates] == [False, False, False, True, False, False]
    assert [update.update for update in reported.updates] == [1, 2, 3, 3, 4, 5]
    model = make().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(data()):
        if index != cls.at:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert same(model.state_dict(), trainer.model.state_dict())
    assert all(math.isfinite(v) for p in trainer.model.state_dict().values() for v in p.flatten().tolist())


def test_ignore_lets_it_pass():
    trainer = make(on_nonfinite="ignore")
    result = trainer.fit(data(), epochs=1)
    assert (result.updates, result.skipped) == (6, 0)
    assert not torch.isfinite(trainer.model[0].weight).any()


def test_the_gradient_is_checked_before_it_is_clipped():
    """Clipping by value turns an infinite gradient into a finite one."""
    from trainwright import ClipValue

    with pytest.raises(NonFiniteError, match="gradient is not finite"):
        make(GradientOnly, clip=ClipValue(0.1)).fit(data(), epochs=1)


def test_a_mean_of_the_users_own_gets_the_advice_to_use_sum():
    with pytest.raises(NonFiniteError, match=r"return SumLoss\(total, count\)"):
        make().fit(data(), epochs=1)


def test_an_unknown_policy_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="Did you mean 'raise'"):
        make(on_nonfinite="raises")


FP16 = MixedPrecision("fp16", init_scale=1024.0)


def test_an_fp16_overflow_belongs_to_the_scaler_under_every_policy():
    for policy in ("raise", "skip", "ignore"):
        trainer = make(GradientOnly, precision=FP16, on_nonfinite=policy)
        result = trainer.fit(data(), epochs=1)
        assert (result.updates, result.skipped) == (5, 1)
        assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_non_finite_loss_under_fp16_raises():
    trainer = make(precision=FP16)
    with pytest.raises(NonFiniteError, match="update 4: the loss"):
        trainer.fit(data(), epochs=1)
    assert same(trainer.before, snapshot(trainer))


def test_an_overflow_at_the_floor_of_the_scale_raises():
    floor = MixedPrecision("fp16", init_scale=2.0, min_scale=2.0)
    with pytest.raises(NonFiniteError, match="update 4: the gradient"):
        make(GradientOnly, precision=floor).fit(data(), epochs=1)
