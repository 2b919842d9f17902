"""Law Same: an update whose check is deferred is the one that is checked at once, errors included."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from laws.deferred_runs import OPTIMIZERS, Watches, data, defer_on_cpu, net, same, state, trained
from trainwright import EMA, ClipNorm, MixedPrecision, OneCycle, StepLR, Trainer, Updates
from trainwright.core.errors import NonFiniteError
from trainwright.observers import Update
from trainwright.optim.fused import DirectStep
from trainwright.update import deferred_check
from trainwright.update.deferred_check import DeviceLRTable

SLOTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clip": {"clip": 0.1},
    "windows": {"accumulate": 4, "clip": ClipNorm(0.5)},
    "bf16": {"precision": "bf16"},
    "steps": {"schedule": StepLR(Updates(3), gamma=0.5)},
    "one cycle": {"schedule": OneCycle(max_lr=0.1)},
    "average": {"average": EMA(0.9)},
}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_deferred_check_is_an_immediate_one(optimizer: str, slots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = slots in ("windows", "nothing")
    at_once, reported, _ = trained(data(), model=net(norm=norm), optimizer=optimizer, **SLOTS[slots])
    defer_on_cpu(monkeypatch)
    late, reported_late, error = trained(data(), model=net(norm=norm), optimizer=optimizer, **SLOTS[slots])
    assert error is None
    agree(state(at_once), state(late), slots)
    agree(at_once.history, late.history, slots)
    agree(reported.records, reported_late.records, slots)
    assert reported.at == [record.update for record in reported.records]


HELD_BACK: dict[str, dict[str, Any]] = {
    "skip": {"on_nonfinite": "skip"},
    "skip and steps": {"on_nonfinite": "skip", "schedule": StepLR(Updates(2), gamma=0.5), "clip": 0.1},
    "fp16": {"precision": MixedPrecision("fp16", init_scale=2.0**20, growth_interval=3)},
    "fp16 and one cycle": {
        "precision": MixedPrecision("fp16", init_scale=2.0**20, growth_interval=2),
        "schedule": OneCycle(max_lr=0.1, cycle_momentum=False),
        "clip": 0.5,
        "accumulate": 2,
    },
    "fp16 and skip": {"precision": MixedPrecision("fp16", init_scale=2.0**20), "on_nonfinite": "skip"},
    "fp16 and ignore": {"precision": MixedPrecision("fp16", init_scale=2.0**20), "on_nonfinite": "ignore"},
}


@pytest.mark.parametrize("parts", HELD_BACK)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 2, None])
def test_what_the_device_leaves_out_the_host_leaves_out(
    bad: int | None, optimizer: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = HELD_BACK[parts]
    bad = bad if slots.get("on_nonfinite") == "skip" else None

    def run() -> Any:
        trainer, reported, error = trained(data() if bad is None else poisoned(bad), optimizer=optimizer, **slots)
        assert error is None
        return trainer, reported

    at_once, reported = run()
    defer_on_cpu(monkeypatch)
    late, reported_late = run()
    assert at_once.result is not None
    assert late.result is not None
    assert (at_once.result.updates, at_once.result.skipped) == (late.result.updates, late.result.skipped)
    assert at_once.result.updates
    assert at_once.result.skipped or (bad is None and "fp16" not in parts)
    assert [record.update for record in reported.records] == [record.update for record in reported_late.records]
    assert [record.skipped for record in reported.records] == [record.skipped for record in reported_late.records]
    assert [record.lrs for record in reported.records] == [record.lrs for record in reported_late.records]
    scales = [record.loss_scale for record in reported.records]
    assert scales == [record.loss_scale for record in reported_late.records]
    assert (None in scales) == ("fp16" not in parts)
    close(masked(state(at_once)), masked(state(late)))
    for name in ("loss", "lr", "update", "epoch"):
        ours, theirs = ([row[name] for row in trainer.history] for trainer in (at_once, late))
        assert ours == pytest.approx(theirs, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("rows", [5, 6, 9])
def test_a_table_of_rates_is_sent_anew_where_it_ends(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_check, "ROWS", rows)
    schedule = StepLR(Updates(3), gamma=0.8)
    batches = poisoned(2) * 4
    at_once, reported, _ = trained(batches, on_nonfinite="skip", schedule=schedule, epochs=2)
    defer_on_cpu(monkeypatch)
    late, reported_late, error = trained(batches, on_nonfinite="skip", schedule=schedule, epochs=2)
    assert error is None
    assert [record.lrs for record in reported.records] == [record.lrs for record in reported_late.records]
    close(masked(state(at_once)), masked(state(late)))


def test_a_table_of_rates_is_sent_once_and_not_at_each_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_on_cpu(monkeypatch)
    sent, real = [], DeviceLRTable._send
    monkeypatch.setattr(DeviceLRTable, "_send", lambda self, first: sent.append(first) or real(self, first))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = StepLR(Updates(3), gamma=0.5)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), on_nonfinite="skip", schedule=schedule, console=False)
    trainer.fit(data(), data(), epochs=2, validate=Updates(1))
    assert sent == [0]


def agree(a: Any, b: Any, slots: str) -> None:
    """Bit for bit, but where the kernels of the steps clip too: they divide where `clip_grad_norm_` multiplies."""
    if "clip" in SLOTS[slots]:
        close(a, b)
    else:
        assert same(a, b)


def close(a: Any, b: Any) -> None:
    """Rates are float32 on the device, which moves last bits of the weights."""
    if isinstance(a, Update):
        close(asdict(a), asdict(b))
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6, nan_ok=True)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key])
    elif isinstance(a, tuple | list):
        for x, y in zip(a, b, strict=True):
            close(x, y)


def test_the_end_is_reached_exactly_whatever_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_on_cpu(monkeypatch)
    reported = Watches()
    model = net()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        nn.CrossEntropyLoss(),
        console=False,
        observers=[reported],
        precision=MixedPrecision("fp16", init_scale=2.0**20),
        schedule=StepLR(Updates(3), gamma=0.5),
    )
    reported.trainer = trainer
    result = trainer.fit(data(), max_updates=10, validate=Updates(4))
    assert result.updates == 10
    assert result.skipped > 0
    assert [record.update for record in reported.records if not record.skipped] == list(range(1, 11))
    assert [record.lr for record in reported.records if not record.skipped] == pytest.approx(
        [0.01 * 0.5 ** (update // 3) for update in range(10)]
    )


def test_a_record_arrives_three_updates_later_and_all_arrive_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_on_cpu(monkeypatch)
    _, reported, _ = trained(data(), epochs=2)
    assert [record.update for record in reported.records] == list(range(1, 13))
    assert reported.at == [4, 5, 6, 6, 6, 6, 10, 11, 12, 12, 12, 12]


def test_pending_numbers_hold_no_autograd_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.update.deferred_check import AsyncReads

    defer_on_cpu(monkeypatch)
    real, sent = AsyncReads.push, list[Any]()

    def push(self: Any, values: Any, deliver: Any, **more: Any) -> None:
        sent.extend(entry[1] for entry in deliver.args[0].entries)
        real(self, values, deliver, **more)

    monkeypatch.setattr(AsyncReads, "push", push)
    trained(data(), epochs=1)
    assert len(sent) == 6
    assert not any(value.requires_grad for value in sent)


def poisoned(at: int) -> list[Any]:
    """Data of which one batch makes the loss NaN."""
    batches = data()
    inputs, target = batches[at]
    batches[at] = (torch.full_like(inputs, torch.nan), target)
    return batches


class Explodes(torch.autograd.Function):
    """Finite forward, infinite backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


@pytest.mark.parametrize("slots", ["nothing", "clip", "windows", "average", "one cycle"])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_not_finite_leaves_all_as_before_it(
    optimizer: str, what: str, at: int, slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        model = net(norm=True)
        if what == "gradient":
            model = nn.Sequential(Bomb(model[0]), *model[1:])
        batches = poisoned(at) if what == "loss" else exploding(at)
        trainer, reported, error = trained(batches, model=model, optimizer=optimizer, epochs=2, **SLOTS[slots])
        assert isinstance(error, NonFiniteError)
        return trainer, reported, str(error)

    at_once, reported, said = run()
    defer_on_cpu(monkeypatch)
    late, reported_late, said_late = run()
    assert said == said_late
    agree(masked(state(at_once)), masked(state(late)), slots)
    agree(reported.records, reported_late.records, slots)
    assert at_once.result is not None
    assert late.result is not None
    assert at_once.result.updates == late.result.updates
    assert at_once.progress.batch == late.progress.batch
    assert at_once.progress.rows == late.progress.rows
    assert at_once.optimizer.param_groups[0]["lr"] == late.optimizer.param_groups[0]["lr"]


def masked(states: Any) -> Any:
    """The same without what no step has moved yet: zeros, which stand for none."""
    model, optimizer = states
    moved = {key: {name: v for name, v in own.items() if v is not None and v.any()} for key, own in optimizer.items()}
    return model, {key: own for key, own in moved.items() if own}


class Bomb(nn.Module):
    """A layer whose gradient is infinite for a batch that begins with 7."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        return Explodes.apply(output) if x[0, 0].item() == 7.0 else output


def exploding(at: int) -> list[Any]:
    """Data of which one batch makes the gradient infinite, and the loss not."""
    batches = data()
    batches[at][0][0, 0] = 7.0
    return batches


def test_an_error_of_the_user_comes_after_what_was_not_finite_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_on_cpu(monkeypatch)

    def failing() -> Any:
        yield from poisoned(2)[:4]
        raise OSError("the disk is gone")

    _, reported, error = trained(failing(), epochs=1)
    assert isinstance(error, NonFiniteError)
    assert "update 3: the loss is not finite" in str(error)
    assert [record.update for record in reported.records] == [1, 2]


def test_an_error_of_the_user_is_raised_after_all_updates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_on_cpu(monkeypatch)

    def failing() -> Any:
        yield from data()[:4]
        raise OSError("the disk is gone")

    _, reported, error = trained(failing(), epochs=1)
    assert isinstance(error, OSError)
    assert [record.update for record in reported.records] == [1, 2, 3, 4]


# Faults that must be noticed.


def forgets_the_flag(patch: pytest.MonkeyPatch) -> None:
    real = DirectStep.__call__
    patch.setattr(DirectStep, "__call__", lambda self, found_inf, rates, scale: real(self, None, rates, scale=scale))


def keeps_no_statistics(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trainwright.update.snapshot.Tensors.restore", lambda self, ago=0: None)


def puts_back_the_last(patch: pytest.MonkeyPatch) -> None:
    from trainwright.update.snapshot import Tensors

    real = Tensors.restore
    patch.setattr(Tensors, "restore", lambda self, ago=0: real(self, 0))


def lets_the_clock_run_on(patch: pytest.MonkeyPatch) -> None:
    from trainwright.update.deferred_check import DeferredCheck

    real = DeferredCheck.check

    def check(self: Any, *given: Any) -> bool:
        checked = real(self, *given)
        self._before = (self._before[0] + 1, *self._before[1:])
        return checked

    patch.setattr(DeferredCheck, "check", check)


@pytest.mark.parametrize("fault", [forgets_the_flag, keeps_no_statistics, puts_back_the_last, lets_the_clock_run_on])
def test_a_fault_is_noticed(fault: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            test_what_is_not_finite_leaves_all_as_before_it("adamw", "loss", 1, "nothing", patch)


def stops_the_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trainwright.update.deferred_check.DeviceVerdict.count", lambda self: None)


def bakes_the_rates(patch: pytest.MonkeyPatch) -> None:
    real = DeviceLRTable.at
    patch.setattr(DeviceLRTable, "at", lambda self, applied: real(self, torch.zeros_like(applied)))


def adapts_no_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trainwright.update.deferred_check.DeviceScale.adapt", lambda self, overflowed: None)


def takes_none_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trainwright.update.deferred_check.DeferredSkip._count", lambda self, pending, *, left_out: None)


@pytest.mark.parametrize("fault", [stops_the_clock, bakes_the_rates, adapts_no_scale, takes_none_back])
def test_a_fault_of_what_is_left_out_is_noticed(fault: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            test_what_the_device_leaves_out_the_host_leaves_out(None, "adamw", "fp16 and one cycle", patch)
