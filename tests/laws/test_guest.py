"""The Guest law: after `fit`, however it ends, the process and the user's own objects are what they were."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import sys
import warnings

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    Cosine,
    EarlyStopping,
    Epochs,
    MixedPrecision,
    Observer,
    Probe,
    SettingError,
    Trainer,
    Updates,
    accuracy,
    freeze,
)
from trainwright.precision.mixed_precision import matmul_precisions

from .guest_cases import (
    adamw,
    assert_same,
    generators,
    loader,
    network,
    process,
    rows_of_data,
    seed_all,
    things,
)


class Ends(Trainer):
    """Ends as it was asked to, in the third update."""

    how = ""

    def training_step(self, batch):
        if torch.is_grad_enabled() and self.progress.updates == 2:
            if self.how == "stop":
                self.stop("enough")
            if self.how == "error":
                raise RuntimeError("planted")
            if self.how == "interrupt":
                raise KeyboardInterrupt
        return super().training_step(batch)

    def validation_step(self, batch):
        if self.how == "error in validation" and self.progress.updates:
            raise RuntimeError("planted")
        return super().validation_step(batch)

    def begin_epoch(self, epoch):
        if self.how == "error in begin_epoch" and epoch == 1:
            raise RuntimeError("planted")

    def end_epoch(self, metrics):
        if self.how == "error in end_epoch":
            raise RuntimeError("planted")


class Refuses(Observer):
    def on_fit_start(self, plan):
        raise SettingError("planted")


class Fails(Observer):
    def on_update(self, update):
        raise RuntimeError("planted")


ENDS = {
    "normal": None,
    "early": None,
    "stop": None,
    "error": RuntimeError,
    "interrupt": KeyboardInterrupt,
    "error in validation": RuntimeError,
    "error in begin_epoch": RuntimeError,
    "error in end_epoch": RuntimeError,
    "error in an observer": RuntimeError,
    "error in a probe": RuntimeError,
    "refused by an observer": SettingError,
    "refused": SettingError,
}


def settings_of(how):
    """Nearly every part, so that nearly everything that could be left behind is in use."""
    observers = [Probe(lambda trainer: {"probed": 1.0}, every=Updates(2))]
    if how == "refused by an observer":
        observers.append(Refuses())
    if how == "error in an observer":
        observers.append(Fails())
    if how == "error in a probe":
        observers.append(Probe(lambda trainer: 1 / 0 if trainer.progress.updates else None, every=Updates(1)))
    return {
        "metrics": {"accuracy": accuracy},
        "clip": 1.0,
        "schedule": Cosine(),
        "early_stopping": EarlyStopping("val_loss", patience=1, min_delta=100.0 if how == "early" else 0.0),
        "observers": observers,
        "accumulate": 2,
    }


def fitted(model, optimizer, how, *, train, val, teacher=None, **more):
    """A `fit` that ends in this way."""
    frozen = {} if teacher is None else {"frozen": {"teacher": teacher}}
    trainer = Ends(model, optimizer, nn.CrossEntropyLoss(), **{**settings_of(how), **frozen, **more})
    trainer.how = how
    expected = (ZeroDivisionError,) if how == "error in a probe" else ENDS[how]
    ends = {"epochs": 4, "validate": Epochs(0.5) if how == "refused" else Epochs(1)}
    if expected is None:
        result = trainer.fit(train, val, **ends)
        assert result.updates >= 3 and (result.stopped.startswith("epochs=4") or how != "normal")
        assert how != "early" or result.epochs < 4
    else:
        with pytest.raises(expected):
            trainer.fit(train, val, **ends)
    return trainer


def check_end(how="normal", *, console=False, **more):
    """A process and objects with settings of their own, before and after."""
    model, teacher, train, val = network(), network(5), loader(), loader(seed=1)
    optimizer = adamw(model)
    teacher.first.requires_grad_(False)
    teacher.norm.eval()
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.last.register_forward_hook(_nothing)
    before = process(), things(model, optimizer, teacher, train, val)
    fitted(model, optimizer, how, train=train, val=val, teacher=teacher, console=console, **more)
    after = process(), things(model, optimizer, teacher, train, val)
    assert_same(before[0], after[0])
    assert_same(before[1], after[1])


def _nothing(*_):
    return None


@pytest.mark.parametrize("how", ENDS)
def test_process_and_objects_are_what_they_were_however_a_fit_ends(how):
    check_end(how)


@pytest.mark.parametrize("average", [EMA(0.9), SWA(Updates(1), Updates(1))], ids=["EMA", "SWA"])
@pytest.mark.parametrize("how", ["normal", "error", "interrupt", "error in validation", "error in a probe"])
def test_with_an_average_too(how, average):
    check_end(how, average=average)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", MixedPrecision("fp16", init_scale=2.0)], ids=str)
@pytest.mark.parametrize("how", ["normal", "error", "refused"])
def test_with_every_precision_too(how, precision):
    check_end(how, precision=precision)


def test_with_console_and_checkpoint_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_end("normal", console=True, checkpoint=Checkpoint(tmp_path / "runs", best="val_loss", restore_best=True))
    assert capsys.readouterr().out


@pytest.fixture
def unusual_process(monkeypatch, tmp_path):
    """A process in which nothing is at its default."""
    backends = matmul_precisions()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, _handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", _nothing)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("TRAINWRIGHT_TEST", "1")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_dtype("cpu", torch.float16)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "something of the user's own")
            yield
    finally:
        gc.enable()
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        for backend, precision in backends:
            backend.fp32_precision = precision
        torch.set_default_dtype(torch.float32)
        for number, handler in before.items():
            signal.signal(number, handler)


def _handler(*_):
    raise AssertionError("no signal was sent")


@pytest.mark.parametrize("how", ["normal", "error", "interrupt", "refused"])
@pytest.mark.parametrize("precision", [None, "tf32", "fp16"])
@pytest.mark.usefixtures("unusual_process")
def test_settings_of_the_process_that_are_the_users_own_stay(how, precision):
    model = network().double()
    train = [(x.double(), y) for x, y in loader()]
    before = process()
    fitted(model, adamw(model), how, train=train, val=train, precision=precision, console=True)
    assert_same(before, process())


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_in_a_process_that_sets_backends_one_by_one():
    mine = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in mine]
    seen = []

    class Looks(Trainer):
        def training_step(self, batch):
            seen.append([backend.fp32_precision for backend in mine])
            return super().training_step(batch)

    try:
        mine[0].fp32_precision = "tf32"
        model = network()
        Looks(model, adamw(model), nn.CrossEntropyLoss(), precision="tf32", console=False).fit(loader(), epochs=1)
        assert [backend.fp32_precision for backend in mine] == ["tf32", before[1]]
        assert seen[0] == ["tf32", "tf32"]
    finally:
        mine[0].fp32_precision = before[0]


def check_left_in_eval(how="normal"):
    """A model that was left in eval mode trains, and is in eval mode again."""
    model, train = network().eval(), loader()
    seen = []
    model.noise.register_forward_hook(lambda module, *_: seen.append(module.training))
    before = things(model, optimizer := adamw(model), train)
    fitted(model, optimizer, how, train=train, val=loader(seed=1))
    assert_same(before, things(model, optimizer, train))
    assert how == "refused" or True in seen


@pytest.mark.parametrize("how", ["normal", "early", "error", "interrupt", "error in validation", "refused"])
def test_a_model_that_was_in_eval_mode_is_in_eval_mode_again(how):
    check_left_in_eval(how)


def check_construction():
    model, teacher, train = network().eval(), network(5), loader()
    optimizer, loss = adamw(model), nn.CrossEntropyLoss()
    seed_all()
    before = process(), things(model, optimizer, teacher, loss, train), generators()[0], generators()[3].tolist()
    weights = copy.deepcopy(model.state_dict())
    settings = settings_of("normal") | {"average": SWA(), "precision": "fp16", "frozen": {"teacher": teacher}}
    trainer = Trainer(model, optimizer, loss, checkpoint=Checkpoint("nowhere"), console=True, **settings)
    assert trainer.model is model and trainer.optimizer is optimizer and trainer.loss is loss
    assert_same(before[0], process())
    assert_same(before[1], things(model, optimizer, teacher, loss, train))
    assert before[2:] == (generators()[0], generators()[3].tolist())
    assert all(
        torch.equal(one, other) for one, other in zip(weights.values(), model.state_dict().values(), strict=True)
    )


def test_building_a_trainer_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_construction()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("average", [None, EMA(0.9), SWA(Updates(1), Updates(1))], ids=["none", "EMA", "SWA"])
@pytest.mark.parametrize("how", ["normal", "error", "stop"])
def test_model_and_optimizer_can_be_copied_and_pickled_after_a_fit(how, average):
    model = network()
    freeze(model, "norm")
    optimizer = adamw(model)
    fitted(model, optimizer, how, train=loader(), val=loader(seed=1), average=average, precision="bf16")
    model.eval()
    x = rows_of_data()[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(x), other(x)) and type(other) is type(model)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is type(optimizer)
        assert len(other.state) == len(optimizer.state)
