"""What a plain loop does and a step must not, models of parts that cannot be called, and a forgotten return."""

from __future__ import annotations

import pytest
import torch
from refusals import assert_untouched, entry, make, pieces
from torch import nn

from trainwright import StepError, Trainer

RETURNS = {
    "loss": lambda loss: loss,
    "detached": lambda loss: loss.detach(),
    "number": lambda loss: loss.item(),
    "nothing": lambda loss: None,
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("val", [True, False])
def test_a_step_that_runs_backward_itself_gets_the_name_of_who_runs_it(returns, val):
    class Half(Trainer):
        def training_step(self, batch):
            loss = self.loss(self.model(batch[0]), batch[1])
            self.optimizer.zero_grad()
            loss.backward()
            return RETURNS[returns](loss)

    with pytest.raises(RuntimeError) as caught:  # StepError is one
        make(Half).fit(pieces(), pieces(1) if val else None, epochs=1)
    (note,) = caught.value.__notes__
    assert entry(note, "why") == "training_step calls backward() itself"
    assert entry(note, "fix") == "return the loss: the loop calls backward() and the optimizer's step()"


class Complete(Trainer):
    def training_step(self, batch):
        loss = self.loss(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_step_that_steps_the_optimizer_itself_is_refused_before_a_weight_has_changed(precision):
    trainer = make(Complete, precision=precision)
    before = [one.detach().clone() for one in trainer.model.parameters()]
    first = r"^training_step calls backward\(\) and the optimizer's step\(\) itself\n"
    with pytest.raises(StepError, match=first) as caught:
        trainer.fit(pieces(), epochs=1)
    assert_untouched(trainer, before)
    text, line = str(caught.value), Complete.training_step.__code__.co_firstlineno + 4
    assert entry(text, "where") == f"test_plain_loop_habits.py:{line}"
    assert entry(text, "fix") == "return loss, and no backward() and step() before it"
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_a_step_that_trains_another_model_inside_is_no_mistake():
    class Inner(Trainer):
        def training_step(self, batch):
            inner = nn.Linear(4, 3)
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
            self.loss(inner(batch[0]), batch[1]).backward()
            optimizer.step()
            return self.loss(self.model(batch[0]), batch[1])

    assert make(Inner).fit(pieces(), epochs=1).updates == 4


def test_a_forgotten_return_is_not_advised_to_write_a_validation_step():
    class Forgets(Trainer):
        def training_step(self, batch):
            self.loss(self.model(batch[0]), batch[1])

    with pytest.raises(StepError, match="a step returned None") as caught:
        make(Forgets).fit(pieces(), pieces(1), epochs=1)
    assert entry(str(caught.value), "fix") == "return loss"
    assert "validation_step" not in "".join(caught.value.__notes__)


def parts():
    return nn.ModuleDict({"G": nn.Linear(4, 3), "D": nn.Linear(4, 3)})


def two(cls=Trainer):
    return cls(parts(), {"G": torch.optim.Adam, "D": torch.optim.Adam}, nn.CrossEntropyLoss(), console=False)


class Both(Trainer):
    def update(self, window):
        for x, y in window:
            for name in ("G", "D"):
                self.minimize(self.loss(self.model[name](x), y), name)


class Whole(Both):
    def validation_step(self, batch):
        return self.loss(self.model["G"](batch[0]), batch[1])

    def predict_step(self, batch):
        return self.model["G"](batch[0])


class Steps(Trainer):
    def training_step(self, batch):
        return self.loss(self.model["G"](batch[0]), batch[1])


class Calls(Trainer):
    def training_step(self, batch):
        return self.loss(self.model(batch[0]), batch[1])


UPDATE = "override update(self, window), with self.minimize(loss, name) for each of the optimizers"
FORWARDS = {
    "train": (lambda: two().fit(pieces(), epochs=1), UPDATE),
    "one": (lambda: make(model=parts()).fit(pieces(), epochs=1), "override training_step(self, batch)"),
    "val": (lambda: two(Both).fit(pieces(), pieces(1), epochs=1), "override validation_step(self, batch)"),
    "predict": (lambda: two(Both).predict(pieces()), "override predict_step(self, batch)"),
    "own": (lambda: make(Calls, model=parts()).fit(pieces(), epochs=1), "call its parts in place of it"),
}


@pytest.mark.parametrize("role", FORWARDS)
def test_a_model_of_parts_gets_the_hook_to_override(role):
    call, fix = FORWARDS[role]
    with pytest.raises(NotImplementedError) as caught:
        call()
    (note,) = caught.value.__notes__
    assert entry(note, "why") == "ModuleDict has no forward(), so it cannot be called"
    assert entry(note, "fix") == fix


class Foward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def foward(self, x):
        return self.layer(x)


def test_a_module_of_ones_own_without_forward_gets_the_advice_to_have_one():
    with pytest.raises(NotImplementedError) as caught:
        make(model=Foward()).fit(pieces(), epochs=1)
    assert entry(caught.value.__notes__[0], "fix") == "def forward(self, ...) in Foward, which has foward()"


def test_a_lightning_module_as_the_model_gets_the_parts_to_move():
    class Lit(Foward):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(NotImplementedError) as caught:
        make(model=Lit()).fit(pieces(), epochs=1)
    assert entry(caught.value.__notes__[0], "fix").startswith("Trainer(the network in it, optimizer)")


def test_with_the_hooks_that_the_notes_name_it_trains():
    assert two(Whole).fit(pieces(), pieces(1), epochs=1).updates == 4
    assert two(Whole).predict(pieces()).shape == (16, 3)
    assert make(Steps, model=parts()).fit(pieces(), epochs=1).updates == 4
