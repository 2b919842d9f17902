"""Averages are torch's, are swapped in and out without a trace, and refuse settings that cannot work."""

from __future__ import annotations

import sys

import pytest
import torch
from averages import X, normed, same, train, values, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.optim.averaging import EMA, SWA


class Tied(nn.Module):
    """Two layers that share a weight, a frozen one, and one parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.frozen.requires_grad_(False)
        self.small = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))

    def forward(self, x):
        return self.frozen(self.two(torch.tanh(self.one(x)))) + self.small.to(x.dtype)


@pytest.mark.parametrize("settings", [EMA(0.9), SWA(0.0, Updates(1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averages_are_torchs_to_the_bit(settings, dtype):
    model = Tied()
    for layer in model.children():
        layer.to(dtype)
    fold = get_ema_multi_avg_fn(settings.decay) if isinstance(settings, EMA) else None
    torchs = AveragedModel(model, multi_avg_fn=fold)
    average = settings.bind(model)
    for update in train(model, updates=7):
        with torch.no_grad():
            model.frozen.weight += 0.1  # by hand, as a slow copy of a network is
        average.take(update)
        torchs.update_parameters(model)
        raw = values(model)
        with average.swapped():
            assert same(values(model), values(torchs.module))
            assert update == 1 or not same(values(model), raw)
        assert same(values(model), raw)
    assert average.taken == 7


def test_swa_is_the_mean_of_the_weights():
    model = nn.Linear(4, 1).double()
    average, seen = SWA(0.0, Updates(1)).bind(model), []
    for update in train(model, updates=9):
        average.take(update)
        seen.append(weights(model))
    with average.swapped():
        for parameter, *taken in zip(model.parameters(), *seen, strict=True):
            assert (parameter - torch.stack(taken).mean(0)).abs().max() < 1e-15


def test_a_warm_ema_has_tensorflows_decay():
    model = nn.Linear(4, 1).double()
    average, by_hand = EMA(0.3, warmup=True).bind(model), None
    for update in train(model, updates=6):
        average.take(update)
        decay = min(0.3, (1 + update) / (10 + update))
        now = weights(model)
        by_hand = now if by_hand is None else [decay * a + (1 - decay) * w for a, w in zip(by_hand, now, strict=True)]
    with average.swapped():
        for parameter, expected in zip(model.parameters(), by_hand, strict=True):
            assert (parameter - expected).abs().max() < 1e-15


def test_complex_weights_are_averaged_and_integers_have_their_current_value():
    model = nn.Module()
    model.wave = nn.Parameter(torch.tensor([1 + 2j, 3j]))
    model.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
    average = EMA(0.75).bind(model)
    average.take(1)
    with torch.no_grad():
        model.wave += 4 - 4j
        model.steps += 1
    average.take(2)
    with average.swapped():
        assert torch.equal(model.wave, torch.tensor([2 + 1j, 1 + 2j])) and model.steps == 4
    assert torch.equal(model.wave, torch.tensor([5 - 2j, 4 - 1j]))


def test_ema_copies_buffers():
    model = normed()
    average = EMA(0.5).bind(model)
    for update in train(model, updates=3):
        average.take(update)
    buffers = [buffer.clone() for buffer in model.buffers()]
    assert not average.needs_statistics
    with average.swapped():
        assert same(list(model.buffers()), buffers)


@pytest.mark.parametrize(
    ("settings", "taken_at"),
    [
        (SWA(Updates(5), Updates(2)), [6, 8, 10, 12]),
        (SWA(0.0, Updates(5)), [5, 10]),
        (SWA(0.75, Updates(1)), [9, 10, 11, 12]),
        (SWA(0.75), [9, 12]),
        (SWA(0.74), [9, 12]),
        (SWA(0.8), [12]),
        (SWA(Epochs(2), Epochs(2)), [6, 12]),
        (SWA(Epochs(2.5), Epochs(1)), [9, 12]),
        (SWA(Epochs(2), Updates(4)), [8, 12]),
    ],
)
def test_swa_takes_its_averages_at_multiples_of_every_from_its_start(settings, taken_at):
    model, plan = nn.Linear(4, 1), Plan(batches=3, epochs=4)
    average, seen = settings.bind(model, plan), []
    for update in range(1, 13):
        before = average.taken
        average.take(update)
        if update % 3 == 0:
            average.epoch_ended(update, update // 3)
        seen += [update] * (average.taken - before)
    assert seen == taken_at
    assert average.each_update == isinstance(settings.every, Updates)


@pytest.mark.usefixtures("no_garbage")
def test_an_average_takes_six_python_calls_and_no_read_from_the_device():
    calls = []

    def profile(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_name)

    for model in (nn.Linear(4, 4), nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])):
        average = EMA().bind(model)
        average.take(1)
        sys.setprofile(profile)
        try:
            average.take(2)
        finally:
            sys.setprofile(None)
    assert len(calls) == 2 * 6
    average = EMA().bind(nn.Linear(4, 4, device="meta"))  # where there is nothing to be read
    for update in range(1, 4):
        average.take(update)


def test_parameters_stay_the_same_objects_and_an_error_restores_the_raw_weights():
    model = normed()
    average = EMA(0.5).bind(model)
    with average.swapped():
        pass  # nothing to swap yet
    assert not average.apply()
    for update in train(model, updates=3):
        average.take(update)
    raw, objects = values(model), [id(parameter) for parameter in model.parameters()]
    with pytest.raises(KeyError), average.swapped():
        averaged = values(model)
        with average.swapped():
            assert same(values(model), averaged)
        assert same(values(model), averaged)
        with pytest.raises(SettingError, match="while the model holds the averaged"):
            average.take(4)
        raise KeyError
    assert same(values(model), raw) and not same(averaged, raw)
    assert [id(parameter) for parameter in model.parameters()] == objects


def test_batchnorm_is_estimated_as_update_bn_does_once_per_average():
    model, batches, passes = normed(), X.split(8), []
    torchs = AveragedModel(model)
    average = SWA(Updates(1), Updates(1)).bind(model)

    def forward():
        passes.append(1)
        assert not torch.is_grad_enabled() and model.training
        torch.manual_seed(5)
        for batch in batches:
            model(batch)

    for update in train(model, updates=4):
        average.take(update)
        torchs.update_parameters(model)
    torch.manual_seed(5)
    update_bn(batches, torchs.module)
    model.eval()
    model[1].train()
    modes, raw, momentum = [m.training for m in model.modules()], values(model), model[1].momentum
    with pytest.raises(SettingError, match=r"BatchNorm statistics must be estimated.*\n.*1\n"), average.swapped():
        pass
    assert average.needs_statistics and same(values(model), raw)
    for _ in range(2):
        with average.swapped(forward):
            assert same(values(model), values(torchs.module))
            assert [m.training for m in model.modules()] == modes and model[1].momentum == momentum
        assert same(values(model), raw) and len(passes) == 1
        assert not average.needs_statistics
    average.take(5)
    assert average.needs_statistics


def test_a_failing_pass_restores_weights_modes_and_momenta():
    model = normed()
    average = SWA(Updates(1), Updates(1)).bind(model)
    for update in train(model, updates=2):
        average.take(update)
    raw, momentum = values(model), model[1].momentum

    def failing():
        model(X)
        raise OSError

    with pytest.raises(OSError), average.swapped(failing):
        pytest.fail("it must not get here")
    with pytest.raises(DataError, match="no batch went through 1"), average.swapped(lambda: None):
        pytest.fail("it must not get here")
    with pytest.raises(OSError):
        average.apply(failing)
    assert same(values(model), raw) and model[1].momentum == momentum and not average.is_applied
    assert average.needs_statistics and all(module.training for module in model.modules())


def test_a_norm_in_eval_mode_and_other_buffers_do_not_change():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.calls = self.calls + 1
            return x

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), Counting(), nn.Linear(4, 1))
    model[0].eval()
    average = SWA(Updates(1), Updates(1)).bind(model)
    for update in train(model, updates=2):
        average.take(update)
    frozen, moving, calls = values(model[0])[2:], values(model[2])[2:], model[3].calls

    def forward():
        assert model[2].training and not model[0].training
        model(X)

    with average.swapped(forward):
        assert same(values(model[0])[2:], frozen)
        assert not same(values(model[2])[2:], moving)
        assert model[3].calls is calls and calls == 2
        assert not model[0].training


def test_a_module_that_overrides_train_is_called_for_both_modes():
    class Recording(nn.Linear):
        def train(self, mode=True):
            self.mode = mode
            return super().train(mode)

    model = nn.Sequential(Recording(4, 4), nn.BatchNorm1d(4))
    average = SWA(Updates(1), Updates(1)).bind(model)
    model.eval()
    average.take(1)  # in a model that is completely in eval mode no norm is left out
    modes = []
    with average.swapped(lambda: modes.append(model(X) is not None and model[0].mode)):
        assert modes == [True] and model[0].mode is False


def test_a_norm_that_no_batch_reaches_has_its_trained_statistics():
    model = normed()
    model.unused = nn.BatchNorm1d(2)
    model.unused.running_mean.fill_(3.0)
    model.forward = lambda x: model[1](model[0](x))
    average = SWA(Updates(1), Updates(1)).bind(model)
    average.take(1)
    with average.swapped(lambda: model(X)):
        assert model.unused.running_mean[0] == 3.0
    average.attach(model)
    assert not average.needs_statistics


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EMA(1.0), r"EMA\(decay=1.0\)"),
        (lambda: EMA(-0.1), "at least 0"),
        (lambda: EMA("0.9"), "EMA"),
        (lambda: EMA(0.9, warmup=100), r"EMA\(0.9, warmup=True\)"),
        (lambda: SWA(5), r"SWA\(start=Epochs\(5\)\) or SWA\(start=Updates\(5\)\)"),
        (lambda: SWA(1.5), "no unit"),
        (lambda: SWA(Seconds(5)), "seconds cannot be planned"),
        (lambda: SWA(0.5, Seconds(5)), "complete epochs, or updates"),
        (lambda: SWA(0.5, Epochs(1.5)), "complete epochs, or updates"),
        (lambda: SWA(0.5, 3), "complete epochs, or updates"),
        (lambda: SWA().bind(nn.Linear(1, 1)), "without a plan"),
        (lambda: SWA(Epochs(1), Updates(2)).bind(nn.Linear(1, 1)), "without a plan"),
        (lambda: SWA(Updates(13), Updates(1)).bind(nn.Linear(1, 1), Plan(batches=3, epochs=4)), "takes no average"),
        (lambda: SWA(0.9, Updates(7)).bind(nn.Linear(1, 1), Plan(batches=3, epochs=4)), "run of 12 updates"),
        (lambda: SWA(0.0, Updates(13)).bind(nn.Linear(1, 1), Plan(batches=3, epochs=4)), "takes no average"),
        (lambda: SWA(0.5, Epochs(5)).bind(nn.Linear(1, 1), Plan(batches=3, epochs=4)), "takes no average"),
        (lambda: SWA().bind(nn.Linear(1, 1), Plan(batches=3, max_updates=2)), "run of 2 updates"),
        (lambda: SWA(Epochs(5)).bind(nn.Linear(1, 1), Plan(epochs=4)), "run of 4 epochs"),
        (lambda: EMA().bind(nn.Linear(1, 1).to(torch.float8_e5m2)), r"weight cannot be averaged: its dtype is .*e5m2"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, text):
    with pytest.raises(SettingError, match=text):
        make()


def test_a_start_in_epochs_needs_no_plan():
    assert SWA(Epochs(3)).bind(nn.Linear(1, 1)).text == "SWA(Epochs(3)) from epoch 3"
    SWA(Updates(5)).bind(nn.Linear(1, 1), Plan(epochs=4))
