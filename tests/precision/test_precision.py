"""Precision: autocast around the steps, and a loss scale that is torch's own."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

from trainwright import MixedPrecision, Observer, SettingError, Trainer
from trainwright.observers import Update
from trainwright.precision import LossScaler
from trainwright.precision.mixed_precision import as_precision
from trainwright.update.loss_tracker import LossTracker

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(6))
def test_the_scale_is_that_of_torchs_grad_scaler_over_random_overflows(seed):
    rng = random.Random(seed)
    growth, backoff, interval = rng.choice([2.0, 1.5]), rng.choice([0.5, 0.3]), rng.choice([1, 3, 7])
    settings = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    scaler = LossScaler(MixedPrecision("fp16", init_scale=2.0**16, min_scale=1e-38, **settings))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, **settings)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    rate = rng.choice([0.05, 0.1, 0.3])
    for _ in range(150):
        overflowed = rng.random() < rate
        assert scaler.value == theirs.get_scale()
        weight.grad = torch.full((2,), float("inf") if overflowed else 1.0)
        theirs.scale(torch.zeros(()))
        theirs.step(optimizer)
        theirs.update()
        scaler.adapt(overflowed)


def test_powers_of_two_stay_bit_equal_and_state_goes_on():
    scaler = LossScaler(MixedPrecision("fp16", init_scale=8.0, growth_interval=3))
    for overflowed in (False, False, True, False, False):
        scaler.adapt(overflowed)
    other = LossScaler(MixedPrecision("fp16", init_scale=8.0, growth_interval=3))
    other.load_state_dict(scaler.state_dict())
    assert (scaler.value, other.value) == (4.0, 4.0)
    other.adapt(False)
    assert other.value == 8.0
    assert other.inv_scale() == 1 / 8


def test_a_scale_never_leaves_float32_nor_its_floor():
    scaler = LossScaler(MixedPrecision("fp16", init_scale=2.0**126, growth_interval=1))
    for _ in range(5):
        scaler.adapt(False)
    assert scaler.value == 2.0**127
    low = LossScaler(MixedPrecision("fp16", init_scale=4.0, min_scale=1.0))
    for _ in range(5):
        low.adapt(True)
    assert low.value == 1.0
    assert low.at_floor


def test_auto_is_none_on_a_cpu_and_never_fp16():
    assert as_precision("auto", CPU) is None
    assert as_precision(None, CPU) is None


@pytest.mark.parametrize(
    "settings",
    [{"init_scale": 0.5}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"min_scale": 0.0}],
)
def test_a_scale_that_cannot_work_is_refused_when_it_is_given(settings):
    with pytest.raises(SettingError, match="init_scale >= min_scale"):
        MixedPrecision("fp16", **settings)


# Through the Trainer.


def data(batches=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator))] * batches


class Looks(Trainer):
    """Notes what the process looks like inside a step."""

    fails = False

    def training_step(self, batch):
        self.inside = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_float32_matmul_precision(),
            self.model(batch[0]).dtype,
        )
        if self.fails:
            raise RuntimeError("the step failed")
        return super().training_step(batch)


def make(cls=Looks, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False, **settings)


def outside():
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_float32_matmul_precision())


def test_evaluation_puts_the_tf32_switch_back_after_an_exception():
    class Breaks(Trainer):
        def validation_step(self, batch):
            assert torch.get_float32_matmul_precision() == "high"
            raise RuntimeError("no validation today")

    before = outside()
    with pytest.raises(RuntimeError, match="no validation today"):
        make(Breaks, precision="tf32").evaluate(data())
    assert outside() == before


def test_losses_are_reported_in_fp32():
    half = make(precision="bf16").evaluate(data())["val_loss"]
    whole = make().evaluate(data())["val_loss"]
    assert half != whole
    assert half == pytest.approx(whole, rel=0.02)
    assert half != float(torch.tensor(half).bfloat16())


def test_fp16_weights_under_fp16_are_refused():
    model = nn.Linear(4, 3).half()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), precision="fp16", console=False)
    with pytest.raises(SettingError, match=r"model.float\(\)"):
        trainer.fit(data(), epochs=1)


def test_a_loss_scaler_takes_settings_and_no_number():
    with pytest.raises(TypeError, match=r"LossScaler\(16777216.0\)(.|\n)*MixedPrecision\(.fp16., init_scale="):
        LossScaler(2.0**24)


def test_nothing_is_said_of_the_older_switch_that_tf32_is_set_by(monkeypatch):
    real, seen = torch.set_float32_matmul_precision, []

    def warns(precision):
        warnings.warn("Please use the new API settings to control TF32 behavior, such as ...", stacklevel=2)
        seen.append(precision)
        real(precision)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", warns)
    with MixedPrecision("tf32").switches():
        assert torch.get_float32_matmul_precision() == "high"
    assert seen == ["high", "highest"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_gradient_of_a_loss_is_made_once_and_again_after_a_hook_wrote_into_it(dtype):
    tracker = LossTracker(None, Trainer(nn.Linear(1, 1), console=False)._hooks)
    tracker.bind(LossScaler(MixedPrecision("fp16", init_scale=8.0)))
    loss = torch.zeros(3, dtype=dtype, requires_grad=True).sum()
    made = tracker.grad_tensor(loss, 0.25)
    assert made.dtype == dtype and made.shape == () and made == 2.0
    assert tracker.grad_tensor(loss, 0.25) is made and tracker.grad_tensor(loss, 0.125) is None
    made.zero_()
    assert tracker.grad_tensor(loss, 0.25) == 2.0


class Scales(Observer):
    """Keeps the loss scale of every update."""

    def __init__(self) -> None:
        self.seen: list[tuple[float | None, bool]] = []

    def on_update(self, update: Update) -> None:
        self.seen.append((update.loss_scale, update.skipped))


def test_the_record_of_an_update_has_the_loss_scale_of_its_own_backward_and_not_of_the_next():
    scales = Scales()
    model = nn.Linear(4, 1)
    precision = MixedPrecision("fp16", init_scale=2.0**24, growth_interval=2)
    data = [(torch.ones(2, 4), torch.zeros(2, 1))] * 12
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = Trainer(model, optimizer, nn.MSELoss(), precision=precision, observers=[scales], console=False)
    trainer.fit(data, epochs=1)
    expected, scale, good = [], 2.0**24, 0
    for _, skipped in scales.seen:
        expected.append((scale, skipped))
        good = 0 if skipped else good + 1
        scale *= 0.5 if skipped else 2.0 if good == 2 else 1.0
        good %= 2
    assert scales.seen == expected
    assert {skipped for _, skipped in scales.seen} == {True, False}


def test_without_a_loss_scale_the_record_has_none():
    scales = Scales()
    model = nn.Linear(4, 1)
    data = [(torch.ones(2, 4), torch.zeros(2, 1))]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, sgd, nn.MSELoss(), observers=[scales], console=False).fit(data, epochs=1)
    assert scales.seen == [(None, False)]
