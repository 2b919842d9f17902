"""Law Silence: a step reads nothing back from the device. It runs whole on the meta device, which gives nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn

from trainwright import (
    EMA,
    ClipNorm,
    MeanLoss,
    MixedPrecision,
    Observer,
    OneCycle,
    StepLR,
    Trainer,
    Updates,
    accuracy,
)
from trainwright.core import host_reads
from trainwright.update import deferred_check
from trainwright.update.loss_tracker import BackwardArgs, LossTracker

UPDATES_IN_EPOCH = 5


class Gates:
    """Stands in for the two places that read from a device, and counts what goes through each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arrivals = self.reads = 0
        patch.setattr(deferred_check, "fetch", self._fetch)
        patch.setattr(host_reads, "_read_together", self._read)
        patch.setattr(torch, "allclose", lambda *_, **__: True)  # compares the weights when the fit has ended

    def _fetch(self, numbers: Tensor, slot: Tensor) -> None:
        assert numbers.is_meta
        self.arrivals += 1
        slot.zero_()

    def _read(self, values: Any) -> list[float]:
        self.reads += 1
        return [0.0 if isinstance(value, Tensor) and value.is_meta else float(value) for value in values]


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    """The gates; fused kernels are let run on the meta device, which torch itself does not list."""
    lacking = torch.library.Library("aten", "IMPL", "Meta")
    lacking.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None)
    monkeypatch.setattr(torch_optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta", "cpu", "cuda"])
    yield Gates(monkeypatch)
    lacking._destroy()


class Scaled(MixedPrecision):
    """A loss scale without autocast, which torch has not for the meta device."""

    def __init__(self) -> None:
        super().__init__("fp16")

    def autocast(self, device_type: str) -> None:
        return None


class Watches(Observer):
    """Wants everything that can be had of an update."""

    wants = ("grad_norm",)

    def __init__(self) -> None:
        self.reported = 0

    def on_update(self, update: Any) -> None:
        assert isinstance(update.loss, float)
        assert isinstance(update.grad_norm, float)
        self.reported += 1


def net(*, norm: bool = True) -> nn.Module:
    between = [nn.BatchNorm2d(4)] if norm else []
    layers = (nn.Conv2d(1, 4, 3), *between, nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers).to("meta")


def data(accumulate: int) -> list[Any]:
    """Batches for five windows, the last of which is short where it has several."""
    count = UPDATES_IN_EPOCH * accumulate - (accumulate > 1)
    return [(torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))) for _ in range(count)]


PARTS: dict[str, dict[str, Any]] = {
    "bare": {},
    "clip": {"clip": ClipNorm(1.0)},
    "metrics": {"metrics": {"accuracy": accuracy}},
    "average": {"average": EMA(0.9)},
    "windows": {"accumulate": 4},
    "rate": {"schedule": StepLR(Updates(2), gamma=0.5)},
    "ignored": {"on_nonfinite": "ignore"},
    "all": {
        "clip": 1.0,
        "metrics": {"accuracy": accuracy},
        "average": EMA(0.9),
        "accumulate": 4,
        "schedule": OneCycle(max_lr=0.1),
    },
}


# Where an update may be held back. BatchNorm statistics would be checked at once.
HELD_BACK: dict[str, dict[str, Any]] = {
    "skip": {"on_nonfinite": "skip"},
    "scale": {"precision": Scaled()},
    "scale, skip, clip, rates, windows": {
        "precision": Scaled(),
        "on_nonfinite": "skip",
        "clip": 1.0,
        "schedule": OneCycle(max_lr=0.1, cycle_momentum=False),
        "accumulate": 4,
        "metrics": {"accuracy": accuracy},
    },
    "scale, steps": {"precision": Scaled(), "schedule": StepLR(Updates(2), gamma=0.5)},
}


@pytest.mark.parametrize("parts", [*PARTS, *HELD_BACK])
def test_a_fit_reads_between_updates_alone(parts: str, gates: Gates) -> None:
    model, watches = net(norm=parts in PARTS), Watches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    slots = (PARTS | HELD_BACK)[parts]
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), device="meta", console=False, observers=[watches], **slots
    )
    trainer.fit(data(slots.get("accumulate", 1)), epochs=3)
    assert gates.arrivals == watches.reported == 3 * UPDATES_IN_EPOCH
    assert gates.reads <= 3  # one for the metrics of each epoch


class Own(Trainer[nn.Module]):
    """A step that logs, and gives named losses with a count that the device alone knows."""

    def training_step(self, batch: Any) -> Any:
        inputs, target = batch
        output = self.model(inputs)
        valid = (target != 2).sum()
        self.log("spread", output.std())
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return MeanLoss((each * (target != 2)).sum() / valid, valid)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_of_ones_own_is_as_silent(accumulate: int, gates: Gates) -> None:
    model, watches = net(), Watches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    trainer = Own(model, optimizer, device="meta", console=False, accumulate=accumulate, observers=[watches])
    trainer.fit(data(accumulate), epochs=2)
    assert gates.arrivals == watches.reported == 2 * UPDATES_IN_EPOCH
    assert gates.reads == 0


NOT_SILENT: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer without a fused kernel": ({"optimizer": torch.optim.RMSprop}, "RMSprop has no fused kernel"),
    "one that was not built fused": ({"optimizer": torch.optim.AdamW}, "AdamW was not built with fused=True"),
    "a policy that skips, and BatchNorm": ({"on_nonfinite": "skip"}, "BatchNorm statistics are restored"),
}


@pytest.mark.parametrize("case", NOT_SILENT)
def test_what_must_be_checked_at_once_is_read_once_an_update_and_says_why(case: str, gates: Gates) -> None:
    slots, why = NOT_SILENT[case]
    model, seen = net(), []
    make = slots.get("optimizer", lambda p: torch.optim.AdamW(p, fused=True))
    others = {name: value for name, value in slots.items() if name != "optimizer"}

    class Looks(Trainer[nn.Module]):
        def after_update(self) -> None:
            seen.append(self.fast_path)

    trainer = Looks(model, make(model.parameters()), nn.CrossEntropyLoss(), device="meta", console=False, **others)
    trainer.fit(data(1), epochs=1)
    assert gates.arrivals == 0
    assert gates.reads >= UPDATES_IN_EPOCH
    assert why in seen[0]
    assert why in trainer.fast_path


def test_the_path_says_that_nothing_waits(gates: Gates) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), device="meta", console=False)
    assert "nothing is read before its time" in trainer.fast_path


def test_the_path_knows_the_schedule_of_the_run(gates: Gates) -> None:
    model = net(norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = OneCycle(max_lr=0.1, cycle_momentum=True)
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), device="meta", console=False, on_nonfinite="skip", schedule=schedule
    )
    trainer.fit(data(1), epochs=1)
    assert "the schedule sets more than rates" in trainer.fast_path


def test_an_item_in_the_step_is_noticed(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LossTracker.backward_args

    def backward_args(self: LossTracker, returned: Any) -> BackwardArgs:
        args = real(self, returned)
        args[0][0].detach().item()
        return args

    monkeypatch.setattr(LossTracker, "backward_args", backward_args)
    with pytest.raises(RuntimeError):
        test_a_fit_reads_between_updates_alone("bare", gates)


def test_a_read_for_each_update_is_noticed(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.fit.run.why_immediate", lambda *_, **__: ("so",))
    with pytest.raises(AssertionError):
        test_a_fit_reads_between_updates_alone("bare", gates)
