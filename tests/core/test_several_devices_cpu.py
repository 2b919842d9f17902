"""A model over two devices trains as it does on one, and is never moved: on devices emulated on the CPU.

What needs real ones (transfers, streams, their random states, kernels of CUDA) is in tests/gpu/test_several_devices.py.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from lying import FIRST, SECOND, Devices, Lying, put, written_plain
from torch import nn

from trainwright import (
    EMA,
    Checkpoint,
    ClipNorm,
    ClipValue,
    MeanLoss,
    MixedPrecision,
    Observer,
    SettingError,
    Trainer,
    accuracy,
    batches,
)
from trainwright.checkpointing.tree import flatten, loads
from trainwright.core.device import choose_device, devices_of, homes, place


@pytest.fixture
def devices():
    with Devices():
        yield


class Halves(nn.Module):
    """Two layers and a norm; each half computes where it lies, and the output goes back to the input."""

    def __init__(self, *, apart=True, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Linear(8, 3)
        self.to(dtype)
        if apart:
            put(self.first, FIRST)
            put(self.second, SECOND)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.device)).to(x.device)


class Placing(Trainer):
    """Places batches on a device of the type "cpu" too, where the Trainer has nothing to do."""

    def to_device(self, batch):
        return super().to_device(batch)


class Norms(Observer):
    wants = frozenset({"grad_norm"})

    def __init__(self):
        self.seen = []

    def on_update(self, update):
        self.seen.append(update.grad_norm)


def rows(dtype=torch.float64, n=26):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (n,), generator=generator)


def data(dtype=torch.float64):
    return batches(rows(dtype), 4, shuffle=True, seed=0)


def make(model, cls=Placing, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return cls(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def plain(model):
    return [(p.values if isinstance(p, Lying) else p).detach() for p in (*model.parameters(), *model.buffers())]


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(plain(one), plain(other), strict=True))


SETTINGS = {
    "nothing": {},
    "clip norm": {"clip": ClipNorm(0.1)},
    "clip norm 1": {"clip": ClipNorm(0.1, norm_type=1)},
    "clip norm inf": {"clip": ClipNorm(0.1, norm_type=math.inf)},
    "clip value": {"clip": ClipValue(0.01)},
    "accumulate": {"accumulate": 3},
    "fp16": {"precision": MixedPrecision("fp16", init_scale=8.0)},
    "average": {"average": EMA(0.9)},
    "all": {
        "clip": ClipNorm(0.1),
        "accumulate": 3,
        "precision": MixedPrecision("fp16", init_scale=8.0),
        "average": EMA(0.9),
        "metrics": {"accuracy": accuracy},
        "on_nonfinite": "skip",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_devices_give_the_numbers_and_weights_of_one(devices, name):
    """Metrics, norms, statistics, evaluation and `predict` too."""
    settings, runs = SETTINGS[name], []
    dtype, close = (torch.float32, 1e-5) if "precision" in settings else (torch.float64, 1e-12)
    for apart in (True, False):
        norms = Norms()
        trainer = make(Halves(apart=apart, dtype=dtype), observers=[norms], **settings)
        result = trainer.fit(data(dtype), batches(rows(dtype), 8), epochs=2)
        outputs = trainer.predict(batches(rows(dtype)[:1], 8))
        reported = {str(update): norm for update, norm in enumerate(norms.seen)}
        numbers = [*result.history, reported, trainer.evaluate(data(dtype))]
        runs.append((numbers, [outputs, *plain(trainer.model)]))
    (numbers, tensors), (wanted, wanted_tensors) = runs
    assert numbers == [pytest.approx(row, rel=close) for row in wanted]
    assert type(tensors[0]) is torch.Tensor, "what predict gives is on the host"
    for one, other in zip(tensors, wanted_tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_nothing_of_the_model_is_moved_and_batches_go_where_its_first_parameters_are(devices):
    seen = set()

    class Seeing(Placing):
        def training_step(self, batch):
            seen.add(tuple(tensor.device for tensor in batch))
            return super().training_step(batch)

        validation_step = training_step

    trainer = make(Halves(), Seeing)
    before = [id(tensor) for tensor in (*trainer.model.parameters(), *trainer.model.buffers())]
    trainer.fit(data(), batches(rows(), 8), epochs=1)
    trainer.evaluate(data())
    after = (*trainer.model.parameters(), *trainer.model.buffers())
    assert [id(tensor) for tensor in after] == before
    assert trainer.device == FIRST and seen == {(FIRST, FIRST)}
    assert devices_of(trainer.model) == [FIRST, SECOND]
    state = trainer.optimizer.state
    assert all(state[p]["momentum_buffer"].device == p.device for p in trainer.model.parameters())


@pytest.mark.parametrize("device", ["cpu", "cpu:1", FIRST, torch.device("meta")])
def test_a_device_beside_such_a_model_is_refused(devices, device):
    with pytest.raises(SettingError, match="is on several devices") as caught:
        make(Halves(), device=device)
    assert "have  cpu:1, cpu:2" in str(caught.value) and "leave device= out" in str(caught.value)


def test_where_only_a_buffer_lies_elsewhere_the_model_stays_too_and_the_first_parameter_decides():
    model = nn.BatchNorm1d(2)
    model.running_mean = model.running_mean.to("meta")
    assert choose_device("auto", model) == torch.device("cpu")
    place(model, torch.device("meta"))
    assert model.weight.device.type == "cpu"
    with pytest.raises(SettingError, match="is on several devices"):
        choose_device("cpu", model)
    first = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1))
    assert choose_device("auto", first).type == "meta" and choose_device("auto", first[::-1]).type == "cpu"


def test_a_loss_stays_on_the_device_of_such_a_model_that_it_is_on_and_others_are_moved():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    here, there = nn.CrossEntropyLoss(torch.ones(2)), nn.CrossEntropyLoss(torch.ones(2, device="meta"))
    for loss, kind in ((here, "cpu"), (there, "meta")):
        place(loss, torch.device("meta"), beside=model)
        place(loss, torch.device("cpu"), beside=model)
        assert loss.weight.device.type == kind
    place(here, torch.device("meta"), beside=model[1])
    assert here.weight.device.type == "meta"


@pytest.mark.parametrize("half", ["first", "second"])
@pytest.mark.parametrize("precision", [None, MixedPrecision("fp16", init_scale=8.0)])
def test_a_gradient_that_is_not_finite_on_one_device_holds_back_both(devices, half, precision):
    class Poisoned(Placing):
        def compute_gradients(self, window):
            loss = super().compute_gradients(window)
            if self.progress.updates == 2:
                layer = self.model.first[0] if half == "first" else self.model.second
                layer.weight.grad.fill_(math.inf)
                kept.append([tensor.clone() for tensor in plain(self.model)])
            return loss

    kept, trainer = [], make(Halves(dtype=torch.float32), Poisoned, on_nonfinite="skip", precision=precision)
    result = trainer.fit(data(torch.float32), epochs=1)
    assert result.updates == 2 and result.skipped == len(kept) == 5
    parameters = len(list(trainer.model.parameters()))
    for before, after in zip(kept[0][:parameters], plain(trainer.model), strict=False):
        assert torch.equal(before, after)


@pytest.mark.parametrize("on_nonfinite", ["raise", "ignore"])
def test_numbers_and_counts_may_lie_on_either_device(devices, on_nonfinite):
    class Telling(Placing):
        def training_step(self, batch):
            x, y = batch
            output = self.model.second(self.model.first(x).to(SECOND))
            loss = nn.functional.cross_entropy(output, y.to(SECOND))
            self.log("first", x.sum())
            self.log("second", output.sum(), count=(y >= 0).sum())
            return MeanLoss(loss, (y >= 0).sum())

    class Alone(Telling):
        def training_step(self, batch):
            x, y = batch
            output = self.model(x)
            self.log("first", x.sum())
            self.log("second", output.sum(), count=(y >= 0).sum())
            return MeanLoss(nn.functional.cross_entropy(output, y), (y >= 0).sum())

    settings = {"accumulate": 3, "on_nonfinite": on_nonfinite}
    two, one = make(Halves(), Telling, **settings), make(Halves(apart=False), Alone, **settings)
    numbers, wanted = (trainer.fit(data(), epochs=2).history for trainer in (two, one))
    assert numbers == [pytest.approx(row, rel=1e-12) for row in wanted]


def test_a_run_that_is_resumed_has_every_tensor_on_its_own_device(devices, tmp_path):
    def trainer(directory):
        made = make(Halves(), checkpoint=Checkpoint(directory))
        written_plain(made.model, made.optimizer)
        return made

    whole = trainer(tmp_path / "whole")
    whole.fit(data(), epochs=3)
    trainer(tmp_path / "cut").fit(data(), epochs=1)
    resumed = trainer(tmp_path / "cut")
    resumed.fit(data(), epochs=3, resume="auto")
    assert equal(resumed.model, whole.model)
    assert devices_of(resumed.model) == [FIRST, SECOND]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        own, wanted = (t.optimizer.state[p]["momentum_buffer"] for t, p in ((resumed, one), (whole, other)))
        assert own.device == one.device and torch.equal(own.values, wanted.values)


def test_loaded_state_goes_back_to_the_device_where_it_lay():
    """The name of a device stands in the file: here it is written in, for the CPU writes none."""
    jsonable, tensors = flatten({"bank": torch.ones(2), "host": torch.ones(2)})
    asked = []

    def back(saved, model):
        jsonable["bank"]["device"] = saved
        where = homes(model, torch.device("cpu"))

        def asking(name):
            asked.append(name)
            return where(name)

        return loads(json.dumps(jsonable), tensors, device=asking if callable(where) else where)

    apart = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    tree = back("meta", apart)
    assert tree["bank"].device.type == "meta" and tree["host"].device.type == "cpu" and asked == ["meta"]
    assert back("cuda:7", apart)["bank"].device.type == "cpu", "the model does not lie there: the device of the run"
    assert back("meta", apart[0])["bank"].device.type == "cpu" and asked == ["meta", "cuda:7"]


def test_a_step_that_mixes_devices_gets_the_line_to_write(devices):
    class Forgets(Halves):
        def forward(self, x):
            return self.second(self.first(x))

    with pytest.raises(RuntimeError) as caught:
        make(Forgets()).fit(data(), epochs=1)
    (note,) = caught.value.__notes__
    assert "the model is on cpu:1 and cpu:2, and its batches are on cpu:1" in note
    assert "x.to(layer.weight.device)" in note
