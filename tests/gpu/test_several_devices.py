"""A model over two GPUs: never moved, trained as on one, each tensor of a checkpoint back on its own device.

tests/core/test_several_devices_cpu.py tests the same on devices emulated on the CPU. Here are the copies
between devices, CUDA's kernels, the random states of both, and the memory that a checkpoint is loaded into.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainwright import EMA, Checkpoint, ClipNorm, ClipValue, MixedPrecision, SettingError, Trainer, accuracy, batches
from trainwright.core.device import devices_of

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, and there are {COUNT}")]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Halves(nn.Module):
    """Two halves; each computes where it lies, and the output goes back to the input."""

    def __init__(self, second=SECOND, *, dtype=torch.float64, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout)).to(FIRST, dtype)
        self.second = nn.Sequential(nn.Dropout(dropout), nn.Linear(8, 3)).to(second, dtype)

    def forward(self, x):
        return self.second(self.first(x).to(self.second[1].weight.device)).to(x.device)


def rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(26, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (26,), generator=generator)


def data(dtype=torch.float64):
    return batches(rows(dtype), 4, shuffle=True, seed=0)


def make(model, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def tensors(model):
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip": ClipNorm(0.1), "accumulate": 3},
        {"clip": ClipNorm(0.1, norm_type=math.inf)},
        {"clip": ClipValue(0.01), "on_nonfinite": "ignore"},
        {"precision": MixedPrecision("fp16", init_scale=8.0), "clip": 0.1, "accumulate": 3},
        {"average": EMA(0.9), "metrics": {"accuracy": accuracy}, "on_nonfinite": "skip"},
    ],
    ids=lambda settings: " ".join(settings) or "nothing",
)
def test_two_devices_give_the_numbers_and_weights_of_one(settings):
    dtype, close = (torch.float32, 1e-3) if "precision" in settings else (torch.float64, 1e-10)
    runs = []
    for second in (SECOND, FIRST):
        trainer = make(Halves(second, dtype=dtype), **settings)
        result = trainer.fit(data(dtype), batches(rows(dtype), 8), epochs=2)
        outputs = trainer.predict(batches(rows(dtype)[:1], 8))
        runs.append(([*result.history, trainer.evaluate(data(dtype))], [outputs, *tensors(trainer.model)]))
    (numbers, made), (wanted, wanted_tensors) = runs
    assert numbers == [pytest.approx(row, rel=close) for row in wanted]
    for one, other in zip(made, wanted_tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_such_a_model_is_never_moved_and_takes_no_device():
    model = Halves()
    with pytest.raises(SettingError, match="is on several devices"):
        make(model, device="cuda:0")
    trainer = make(model)
    before = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    trainer.fit(data(), batches(rows(), 8), epochs=1)
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == before
    assert trainer.device == FIRST and devices_of(model) == [FIRST, SECOND]


@pytest.mark.parametrize("half", ["first", "second"])
def test_an_overflow_on_one_device_holds_back_both(half):
    kept = []

    class Poisoned(Trainer):
        def compute_gradients(self, window):
            loss = super().compute_gradients(window)
            if self.progress.updates == 2:
                next(getattr(self.model, half).parameters()).grad.fill_(math.inf)
                kept.append([p.detach().clone() for p in self.model.parameters()])
            return loss

    model = Halves(dtype=torch.float32)
    trainer = Poisoned(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        nn.CrossEntropyLoss(),
        precision=MixedPrecision("fp16", init_scale=8.0),
        on_nonfinite="skip",
        console=False,
    )
    result = trainer.fit(data(torch.float32), epochs=1)
    assert result.updates == 2 and result.skipped == len(kept) == 5
    assert all(torch.equal(*pair) for pair in zip(kept[0], model.parameters(), strict=True))


def test_a_run_that_is_resumed_goes_on_with_every_tensor_and_random_state_of_both_devices(tmp_path):
    def trainer(directory):
        made = make(Halves(dropout=0.5), average=EMA(0.9), checkpoint=Checkpoint(directory))
        made.state["bank"] = torch.zeros(3, device=SECOND)
        return made

    def seed():
        torch.manual_seed(5)

    whole, cut, resumed = trainer(tmp_path / "whole"), trainer(tmp_path / "cut"), trainer(tmp_path / "cut")
    seed()
    whole.fit(data(), epochs=3)
    seed()
    cut.fit(data(), epochs=1)
    torch.cuda.manual_seed_all(99)
    torch.manual_seed(99)
    resumed.fit(data(), epochs=3, resume="auto")
    assert all(torch.equal(*pair) for pair in zip(tensors(resumed.model), tensors(whole.model), strict=True))
    assert devices_of(resumed.model) == [FIRST, SECOND] and resumed.state["bank"].device == SECOND
    for parameter in resumed.model.parameters():
        assert resumed.optimizer.state[parameter]["exp_avg"].device == parameter.device
