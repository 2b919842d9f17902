"""The step without its wrapper is the step: same numbers, and nothing that watches a step is passed by."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from trainwright.optim.fused import step_of

FORMS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, fused=True),
}


def made(form="sgd"):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = FORMS[form](model.parameters())
    model(torch.ones(2, 5)).square().sum().backward()
    return model, optimizer


@pytest.mark.parametrize("form", FORMS)
def test_its_steps_are_the_optimizers_bit_for_bit(form):
    (ours, mine), (theirs, other) = made(form), made(form)
    step = step_of(mine)
    for _ in range(5):
        step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    for a, b in zip(mine.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in b if b[key] is not None)


def test_the_wrapper_is_left_out_where_nothing_watches(monkeypatch):
    _, optimizer = made()
    entered = []
    real = torch.autograd.profiler.record_function.__enter__
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", lambda s: entered.append(s) or real(s))
    step_of(optimizer)()
    assert not entered
    optimizer.step()
    assert entered


def test_hooks_are_called_whenever_they_were_registered():
    _, optimizer = made()
    step, called = step_of(optimizer), []
    step()
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
    ]
    step()
    for handle in handles:
        handle.remove()
    step()
    assert called == ["before", "after"]


def test_hooks_on_all_optimizers_are_called():
    _, optimizer = made()
    step, called = step_of(optimizer), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["before", "after"]


def test_a_patched_step_is_the_one_that_is_called():
    _, optimizer = made()
    step, called = step_of(optimizer), []
    optimizer.step = lambda: called.append("mine")
    step()
    assert called == ["mine"]


def test_a_torch_scheduler_on_the_same_optimizer_sees_the_steps():
    _, optimizer = made()
    step = step_of(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it patches the step to warn of a wrong order
    step()
    scheduler.step()  # warns, which is an error here, where the step was passed by


def test_a_subclass_with_a_step_of_its_own_makes_it():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    model = nn.Linear(2, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    step_of(optimizer)()
    assert optimizer.steps == 1


def test_the_profiler_finds_its_label():
    _, optimizer = made()
    step = step_of(optimizer)
    with profile() as recorded:
        step()
    assert any(event.name == "Optimizer.step#SGD.step" for event in recorded.events())
