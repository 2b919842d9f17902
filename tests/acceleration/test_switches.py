"""What a run switches to be faster: stated in the header, put back at its end, and left alone where that was asked."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from compiling import Net, build, by, data, same, weights
from torch import nn

from trainwright import Checkpoint, Fast, Observer, SettingError, Trainer, adamw, batches
from trainwright.acceleration.switches import SHAPES, is_convolutional, may_time, timed_by_cudnn
from trainwright.optim.fused import dtype_broken_in_sgd
from trainwright.optim.named import fused_hint


class Header(Observer):
    def on_fit_start(self, plan):
        self.notes = plan.notes


def fast_lines(trainer, **ends):
    """The lines of the header that tell of speed."""
    header = Header()
    trainer.observers = (header,)
    trainer.fit(data(16), **(ends or {"epochs": 1}))
    return [note for note in header.notes if note.startswith("faster") or "fused" in note]


# Fused optimizers.


@pytest.mark.parametrize(
    "given",
    [
        torch.optim.AdamW,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
)
def test_a_class_or_a_partial_is_made_fused_and_stated(given):
    model = Net()
    trainer = Trainer(model, given, nn.CrossEntropyLoss(), console=False)
    assert all(group["fused"] for group in trainer.optimizer.param_groups)
    kind = type(trainer.optimizer)
    assert fast_lines(trainer) == [f"fast path: fused {kind.__name__}"]
    torch.manual_seed(3)
    theirs = Net()
    made = given(theirs.parameters(), fused=True)
    torch.manual_seed(3)
    ours = Net()
    Trainer(ours, given, nn.CrossEntropyLoss(), console=False).fit(data(16), epochs=2)
    source = data(16)
    for epoch in range(2):
        for x, y in source.epoch(epoch):
            made.zero_grad()
            nn.functional.cross_entropy(theirs(x), y).backward()
            made.step()
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize(
    ("given", "fast"),
    [
        (partial(torch.optim.AdamW, fused=False), None),
        (partial(torch.optim.AdamW, foreach=True), None),
        (partial(torch.optim.AdamW, foreach=False), None),
        (partial(torch.optim.AdamW, differentiable=False), None),
        (partial(torch.optim.AdamW, lr=0.1), Fast(defaults=False)),
        (torch.optim.RMSprop, None),
        (lambda model: torch.optim.AdamW(model.parameters()), None),
    ],
)
def test_what_the_user_has_chosen_is_made_as_it_is(given, fast):
    trainer = Trainer(Net(), given, nn.CrossEntropyLoss(), fast=fast, console=False)
    assert not trainer.optimizer.param_groups[0].get("fused")
    assert fast_lines(trainer) == []


def test_kernels_that_would_not_serve_are_not_asked_for():
    class Words(nn.Module):
        def __init__(self, **kind):
            super().__init__()
            self.words, self.head = nn.Embedding(5, 4, **kind), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.words((x[:, 0] > 0).long()))

    made = partial(torch.optim.SGD, lr=0.1)
    assert Trainer(Words(), made, nn.CrossEntropyLoss()).optimizer.param_groups[0]["fused"] is True
    trainer = Trainer(Words(sparse=True), made, nn.CrossEntropyLoss(), console=False)
    assert trainer.optimizer.param_groups[0]["fused"] is None
    trainer.fit(data(16), epochs=1)
    whole = Net()
    whole.whole = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert Trainer(whole, made, nn.CrossEntropyLoss()).optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_of_reduced_precision_on_the_cpu_is_not_made_fused_where_the_kernel_is_wrong(momentum, dtype):
    def cast():
        torch.manual_seed(3)
        return nn.Linear(16, 8).to(dtype)

    if dtype_broken_in_sgd(cast().parameters()) is None:
        pytest.skip("the kernel of this torch is right")
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(8)
    made = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    given = Trainer(cast(), made(cast().parameters()), nn.CrossEntropyLoss(), console=False)
    assert fused_hint(given.optimizers, None) == []
    trainer = Trainer(cast(), made, nn.CrossEntropyLoss(), console=False)
    trainer.fit([rows] * 3, epochs=1)
    by_hand = cast()
    plain = made(by_hand.parameters(), fused=False)
    for _ in range(3):
        plain.zero_grad()
        nn.functional.cross_entropy(by_hand(rows[0]), rows[1]).backward()
        plain.step()
    assert same(weights(trainer.model), weights(by_hand))
    assert not same(weights(trainer.model), weights(cast()))


@pytest.mark.slow
def test_an_optimizer_that_could_be_fused_is_hinted_at_where_the_run_is_long():
    hint = ["AdamW(..., fused=True) would make the same updates faster"]
    assert fast_lines(build(), max_updates=1000) == hint
    assert fast_lines(build(), max_updates=10) == []
    assert fast_lines(build(Fast(defaults=False)), max_updates=1000) == []
    for chosen in ({"foreach": False}, {"fused": False}):
        assert fast_lines(build(optimizer=partial(torch.optim.AdamW, **chosen)), max_updates=1000) == []
    assert fast_lines(build(optimizer=partial(torch.optim.AdamW, fused=True)), max_updates=1000) == [
        "fast path: fused AdamW"
    ]
    trainer = Trainer(Net(), adamw(lr=0.1), nn.CrossEntropyLoss(), console=False)
    assert fast_lines(trainer) == ["fast path: fused AdamW"]


# Layout.


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def images(rows=20):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, 3, 6, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return batches((x, y), 8, shuffle=True, seed=1)


class Layouts(Trainer):
    """Takes down whether weights, gradients and state lie channels-last."""

    stops_at = 0

    def after_update(self):
        weight = self.model.body[2].weight
        state = self.optimizer.state[weight].values()
        found = [weight, weight.grad, *[one for one in state if isinstance(one, torch.Tensor) and one.ndim == 4]]
        self.seen = [one.is_contiguous(memory_format=torch.channels_last) for one in found]
        if self.progress.updates == self.stops_at:
            self.stop("here")


OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=0.01)}


def trained(fast, *, optimizer="sgd", stops_at=0, fits=1, resume=None, **settings):
    torch.manual_seed(1)
    trainer = Layouts(Images(), OPTIMIZERS[optimizer], nn.CrossEntropyLoss(), fast=fast, console=False, **settings)
    trainer.stops_at = stops_at
    for _ in range(fits):
        trainer.fit(images(), epochs=4, resume=resume)
    return trainer


def is_plain(trainer):
    state = [one for each in trainer.optimizer.state.values() for one in each.values() if isinstance(one, torch.Tensor)]
    parameters = list(trainer.model.parameters())
    return all(one.is_contiguous() for one in [*parameters, *[p.grad for p in parameters], *state])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_lie_channels_last_while_fit_runs_and_as_before_afterwards(optimizer):
    plain = trained(None, optimizer=optimizer, fits=2)
    laid = trained(Fast(channels_last=True), optimizer=optimizer, fits=2)
    assert all(laid.seen) and not any(plain.seen) and is_plain(laid)
    for mine, theirs in zip(laid.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    header = Header()
    laid.observers = (header,)
    laid.fit(images(), epochs=1)
    assert any("weights of convolutions channels-last" in note for note in header.notes)


def test_weights_lie_as_before_after_an_error():
    class Fails(Layouts):
        def after_update(self):
            super().after_update()
            raise RuntimeError("mine")

    torch.manual_seed(1)
    trainer = Fails(Images(), OPTIMIZERS["sgd"], nn.CrossEntropyLoss(), fast=Fast(channels_last=True), console=False)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(images(), epochs=1)
    assert all(trainer.seen) and is_plain(trainer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_lays_the_state_that_it_loads_as_its_weights(directory, optimizer):
    fast = Fast(channels_last=True)
    whole = trained(fast, optimizer=optimizer)
    trained(fast, optimizer=optimizer, stops_at=5, checkpoint=Checkpoint(directory))
    resumed = trained(fast, optimizer=optimizer, resume="auto", checkpoint=Checkpoint(directory))
    assert all(resumed.seen) and same(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("laid", [True, False])
def test_a_state_that_was_saved_in_another_layout_goes_on_in_that_of_the_weights(directory, optimizer, laid):
    before, after = Fast(channels_last=not laid), Fast(channels_last=laid)
    whole = trained(after, optimizer=optimizer)
    trained(before, optimizer=optimizer, stops_at=5, checkpoint=Checkpoint(directory))
    resumed = trained(after, optimizer=optimizer, resume="auto", checkpoint=Checkpoint(directory))
    assert set(resumed.seen) == {laid} and is_plain(resumed)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_on_the_cpu_no_layout_is_chosen_unasked():
    trainer = trained(None, precision="bf16")
    assert not any(trainer.seen)


def test_what_is_convolutional_is_counted_by_layers():
    assert is_convolutional(Images()) and not is_convolutional(Net())
    assert not is_convolutional(nn.Sequential(nn.Conv2d(3, 8, 4), *[nn.Linear(8, 8) for _ in range(3)]))


# cuDNN's choice by timing: the switch exists without a device too.


def test_timing_is_on_for_as_long_as_inputs_keep_their_shapes_and_put_back():
    model = Images()
    assert may_time(model) and not may_time(Net()) and not torch.backends.cudnn.benchmark
    with timed_by_cudnn(model):
        for size in range(6, 6 + SHAPES):
            model(torch.zeros(1, 3, size, size))
            assert torch.backends.cudnn.benchmark
        model(torch.zeros(1, 3, 40, 40))
        assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark and not model.body[0]._forward_pre_hooks
    with pytest.raises(RuntimeError), timed_by_cudnn(model):
        raise RuntimeError
    assert not torch.backends.cudnn.benchmark and not model.body[0]._forward_pre_hooks


def test_nothing_is_timed_where_the_same_algorithms_were_asked_for(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert not may_time(Images())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # the user's own, which stays
    assert not may_time(Images())


# All of it.


def test_fast_is_refused_where_it_is_no_fast():
    with pytest.raises(TypeError, match="fast='regional'"):
        build("regional")
    with pytest.raises(SettingError):
        build(Fast(compile="regional"), model=lambda: torch.compile(Net(), backend="eager")).fit(data(), epochs=1)
    assert build(by()).fast == by() and build().fast == Fast()
