"""The step without its wrapper: all that watches a step is called. Its numbers: test_fused.py and law Plain."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from trainwright.optim.fused import step_of


def made():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 5)).square().sum().backward()
    return model, optimizer


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
