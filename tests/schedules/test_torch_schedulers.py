"""A scheduler of torch's that the user has built on the optimizer and steps alone: works where `schedule=` is empty."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from records import Records
from trainwright import Checkpoint, CheckpointError, Cosine, SettingError, Trainer, Updates, find_lr
from trainwright.fit.arguments import _needs_a_closure
from trainwright.optim.fused import maskable_step_of
from trainwright.tools.debug import smoke_run

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2])], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "SWALR": lambda o: SWALR(o, 0.05),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def data():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(4)]


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


class Stepped(Trainer):
    """The line of a migrated loop: a scheduler of torch's, stepped `by` hand."""

    scheduler = None
    by = "epoch"

    def after_update(self):
        if self.by == "update":
            self.scheduler.step()

    def end_epoch(self, metrics):
        if self.by == "epoch":
            self.scheduler.step()


class Saved(Stepped):
    def parts(self):
        return {**super().parts(), "scheduler": self.scheduler}


def trained(kind=Stepped, *, by="update", make=SCHEDULERS["ExponentialLR"], optimizer="sgd", epochs=3, **given):
    """A trainer with a scheduler on its optimizer, after `fit`."""
    model, fit = net(), given.pop("fit", {})
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = make(optimizer)
    trainer = kind(model, optimizer, nn.MSELoss(), console=False, **given)
    trainer.scheduler, trainer.by = scheduler, by
    trainer.fit(data(), epochs=epochs, **fit)
    return trainer


def by_hand(make, optimizer, by, epochs=3):
    """The plain loop; the weights, and the rate of each update."""
    model = net()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        for x, y in data():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if by == "update":
                scheduler.step()
        if by == "epoch":
            scheduler.step()
    return model, rates


@pytest.mark.parametrize(
    ("name", "optimizer", "by"),
    [(name, "sgd", ("epoch", "update")[index % 2]) for index, name in enumerate(SCHEDULERS)]
    + [("StepLR", optimizer, by) for optimizer, by in (("adam", "epoch"), ("adamw fused", "update"))],
)
def test_it_gives_the_weights_and_the_logged_rates_of_the_plain_loop(name, optimizer, by):
    seen = Records()
    trainer = trained(by=by, make=SCHEDULERS[name], optimizer=optimizer, observers=[seen])
    model, rates = by_hand(SCHEDULERS[name], optimizer, by)
    assert all(torch.equal(*pair) for pair in zip(trainer.model.parameters(), model.parameters(), strict=True))
    assert seen.rates == rates
    assert [row["lr"] for row in trainer.history] == rates[3::4]


class BuildsIt(Stepped):
    """Builds the scheduler when the run has begun, as it knows the data only then."""

    def begin_epoch(self, epoch):
        if not epoch:
            self.scheduler = SCHEDULERS["ExponentialLR"](self.optimizer)


class StepsInUpdate(Stepped):
    def update(self, window):
        loss = super().update(window)
        self.scheduler.step()
        return loss


class StepsInApply(Stepped):
    def apply_gradients(self, name=None, closure=None):
        applied = super().apply_gradients(name, closure)
        self.scheduler.step()
        return applied


@pytest.mark.parametrize("kind", [BuildsIt, StepsInUpdate, StepsInApply])
def test_wherever_it_is_built_and_stepped_the_logged_rate_is_the_used_one(kind):
    seen = Records()
    by = "update" if kind is BuildsIt else "elsewhere"
    trained(kind, by=by, make=(lambda _: None) if kind is BuildsIt else SCHEDULERS["ExponentialLR"], observers=[seen])
    assert seen.rates == by_hand(SCHEDULERS["ExponentialLR"], "sgd", "update")[1]


class StepsInEvaluate(Stepped):
    def evaluate(self, data, name="val", *, batch_size=None):
        numbers = super().evaluate(data, name, batch_size=batch_size)
        self.scheduler.step(numbers["val_loss"])
        return numbers


def test_a_row_has_the_rate_of_the_last_update_where_evaluate_steps():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = StepsInEvaluate(model, optimizer, nn.MSELoss(), console=False)
    trainer.by = "validation"
    trainer.scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    result = trainer.fit(data(), data(), epochs=3)
    assert [row["lr"] for row in result.history] == pytest.approx([0.1, 0.1, 0.01])


class Skips(Stepped):
    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss * float("nan") if self.progress.batch == 1 and not self.progress.skipped else loss


def test_an_update_that_is_skipped_is_logged_with_its_own_rate():
    seen = Records()
    trained(Skips, observers=[seen], on_nonfinite="skip", epochs=1)
    assert seen.rates == pytest.approx([0.1, 0.09, 0.09, 0.081])


@pytest.mark.parametrize("made", [*OPTIMIZERS.values(), torch.optim.LBFGS])
def test_a_closure_is_needed_by_the_optimizers_own_step_not_by_what_is_wrapped_around_it(made):
    optimizer = made(net().parameters())
    needs = isinstance(optimizer, torch.optim.LBFGS)
    assert _needs_a_closure(optimizer) is needs
    SCHEDULERS["StepLR"](optimizer)
    assert _needs_a_closure(optimizer) is needs


def test_lbfgs_with_a_scheduler_is_still_refused_in_the_default_update():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    SCHEDULERS["StepLR"](optimizer)
    with pytest.raises(SettingError, match=r"LBFGS\.step needs a closure"):
        Trainer(model, optimizer, nn.MSELoss(), console=False).fit(data(), epochs=1)


def test_beside_schedule_it_is_refused_with_the_line_to_write_when_either_comes_last():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.MSELoss(), schedule=Cosine(), console=False)
    scheduler = SCHEDULERS["StepLR"](optimizer)
    with pytest.raises(SettingError, match="TorchSchedule") as refused:
        trainer.fit(data(), epochs=1)
    assert "new optimizer" in str(refused.value)
    with pytest.raises(SettingError, match="TorchSchedule"):
        trainer.plan(data(), epochs=1)
    del scheduler  # which leaves the mark on the optimizer
    with pytest.raises(SettingError, match="TorchSchedule"):
        Trainer(model, optimizer, nn.MSELoss(), schedule=Cosine(), console=False)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Trainer(model, fresh, nn.MSELoss(), schedule=Cosine(), console=False).fit(data(), epochs=1).updates == 4


class Both(Trainer):
    def update(self, window):
        loss = self.compute_gradients(window)
        self.apply_gradients("a")
        self.apply_gradients("b")
        self.scheduler.step()
        return loss


def test_of_several_optimizers_only_the_one_with_both_is_refused_and_each_logs_its_own_rate():
    model = net()
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in zip("ab", model.parameters(), strict=True)}
    scheduler = lr_scheduler.ExponentialLR(optimizers["b"], 0.5)
    with pytest.raises(SettingError, match="'b'"):
        Both(model, optimizers, nn.MSELoss(), schedule={"b": Cosine()}, console=False)
    trainer = Both(model, optimizers, nn.MSELoss(), schedule={"a": Cosine()}, console=False)
    trainer.scheduler = scheduler
    (row,) = trainer.fit(data(), epochs=1).history
    assert row["lr_b"] == 0.1 * 0.5**3
    assert row["lr_a"] == pytest.approx(0.1 * (1 + math.cos(math.pi * 3 / 4)) / 2)


def test_with_a_checkpoint_it_is_refused_before_the_first_update_unless_it_is_saved(tmp_path):
    seen = Records()
    with pytest.raises(SettingError, match=r"super\(\)\.parts\(\)") as refused:
        trained(checkpoint=Checkpoint(tmp_path / "a"), observers=[seen])
    assert not seen.rates
    assert "new optimizer" in str(refused.value)
    assert trained(Saved, checkpoint=Checkpoint(tmp_path / "b"), epochs=1).result.updates == 4


class InState(Stepped):
    """Holds the scheduler's state in `self.state`, and gives it back when it is loaded."""

    def begin_epoch(self, epoch):
        self.state.setdefault("scheduler", self.scheduler.state_dict())

    def after_update(self):
        super().after_update()
        self.state["scheduler"] = self.scheduler.state_dict()


def test_a_state_that_holds_it_is_enough(tmp_path):
    assert trained(InState, checkpoint=Checkpoint(tmp_path), epochs=1).result.updates == 4


class Own:
    """A part of the user's own around the scheduler."""

    def __init__(self, scheduler):
        self._scheduler = scheduler

    def state_dict(self):
        return {"inner": [self._scheduler.state_dict()]}

    def load_state_dict(self, tree):
        self._scheduler.load_state_dict(tree["inner"][0])


class AroundIt(Stepped):
    def parts(self):
        return {**super().parts(), "rates": Own(self.scheduler)}


class Stops(Exception):
    pass


def stopping(kind, at):
    class Stopping(kind):
        def update(self, window):
            if self.progress.updates == at:
                raise Stops
            return super().update(window)

    return Stopping


@pytest.mark.parametrize(
    ("name", "kind", "at", "by"),
    [
        ("ExponentialLR", Saved, 5, "update"),
        ("MultiStepLR", AroundIt, 9, "epoch"),
        ("SequentialLR", Saved, 4, "epoch"),
        ("OneCycleLR", Saved, 8, "update"),
    ],
)
def test_resumed_from_any_update_it_goes_on_as_if_it_had_never_ended(name, kind, at, by, tmp_path):
    make = SCHEDULERS[name]
    never = trained(kind, by=by, make=make)
    with pytest.raises(Stops):
        trained(stopping(kind, at), by=by, make=make, checkpoint=Checkpoint(tmp_path, every=Updates(1)))
    again = trained(kind, by=by, make=make, checkpoint=Checkpoint(tmp_path), fit={"resume": "auto"})
    assert all(torch.equal(*pair) for pair in zip(never.model.parameters(), again.model.parameters(), strict=True))
    assert [row["lr"] for row in never.history] == [row["lr"] for row in again.history]
    assert never.scheduler.state_dict() == again.scheduler.state_dict()


class BrokenOff(Saved):
    """Ends in the validation at the end of an epoch, after the scheduler has taken its step."""

    breaks = False

    def validation_step(self, batch):
        if self.breaks and self.progress.updates == 8:
            raise Stops
        return super().validation_step(batch)


def test_a_row_that_is_made_after_a_resume_has_the_rate_that_the_last_update_used(tmp_path):
    BrokenOff.breaks = True
    settings = {"checkpoint": Checkpoint(tmp_path, every=Updates(1)), "on_error": "save"}
    with pytest.raises(Stops):
        trained(BrokenOff, fit={"val": data()}, **settings)
    BrokenOff.breaks = False
    again = trained(BrokenOff, fit={"val": data(), "resume": "auto"}, **settings)
    never = trained(BrokenOff, fit={"val": data()})
    assert [row["lr"] for row in again.history] == [row["lr"] for row in never.history]


def test_a_scheduler_that_fits_another_is_an_error_of_the_checkpoint(tmp_path):
    trained(Saved, checkpoint=Checkpoint(tmp_path), epochs=1)
    with pytest.raises(CheckpointError, match="missing"):
        trained(AroundIt, checkpoint=Checkpoint(tmp_path), fit={"resume": "auto"})


def test_a_trial_leaves_the_scheduler_as_it_was():
    trainer = trained(epochs=1)
    before = copy.deepcopy(trainer.scheduler.state_dict()), trainer.optimizer.param_groups[0]["lr"]
    smoke_run(trainer, data())
    assert (trainer.scheduler.state_dict(), trainer.optimizer.param_groups[0]["lr"]) == before
    assert trainer.fit(data(), epochs=1).updates == 4


def test_a_sweep_of_rates_is_refused_where_a_scheduler_sets_them():
    trainer = trained(epochs=1)
    with pytest.raises(SettingError, match="find_lr"):
        find_lr(trainer, data())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_torch_has_wrapped_is_left_out_by_the_flag_as_any_other(optimizer):
    model, wrapped = net(), net()
    plain, marked = (OPTIMIZERS[optimizer](one.parameters()) for one in (model, wrapped))
    scheduler = SCHEDULERS["ExponentialLR"](marked)
    fused = optimizer == "adamw fused"
    for bad in (0.0, 1.0, 0.0):
        for one, made in ((model, plain), (wrapped, marked)):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            maskable_step_of(made, torch.tensor(bad))()
        if fused and bad:
            assert plain.state[next(model.parameters())]["step"] == marked.state[next(wrapped.parameters())]["step"]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), wrapped.parameters(), strict=True))
    scheduler.step()  # torch warns where the wrapped step was not called
