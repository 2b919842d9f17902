"""`on_nonfinite="skip"` leaves an update out as if its batch were not there, buffers and `state` included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import Trainer

GENERATOR = torch.Generator().manual_seed(0)
DATA = [(torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 1, generator=GENERATOR)) for _ in range(7)]
BAD = 3
POISONED = [(x / 0 if i == BAD else x, y) for i, (x, y) in enumerate(DATA)]


class Scaled(nn.Module):
    """Divides its input by a running scale that each forward in train mode moves, in a way of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        if self.training:
            self.move(0.5 * self.scale + 0.5 * x.detach().abs().mean(0))
        return self.linear(x / self.scale)

    def move(self, new):
        self.scale.copy_(new)


class Assigned(Scaled):
    def move(self, new):
        self.scale = new


class ThroughData(Scaled):
    def move(self, new):
        self.scale.data.copy_(new)  # leaves the version counter as it is


class DataAssigned(Scaled):
    def move(self, new):
        self.scale.data = new


class WrittenThenAssigned(Scaled):
    def move(self, new):
        self.scale.mul_(math.nan)
        self.scale = new


class Expanded(Scaled):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1).expand(3)

    def move(self, new):
        self.scale._base.copy_(new.mean())


class Grows(Scaled):
    """A buffer that is longer after each forward."""

    def move(self, new):
        self.scale = torch.cat([self.scale, new[:1]])

    def forward(self, x):
        if self.training:
            self.move(x.detach().abs().mean(0))
        return self.linear(x / self.scale.mean())


class Registered(Scaled):
    """Registers its buffer in the first forward that is not finite, and uses it from then on."""

    def move(self, new):
        if not new.isfinite().all():
            self.register_buffer("poison", new)

    def forward(self, x):
        if self.training:
            self.move(x.detach().abs().mean(0))
        return self.linear(x) + getattr(self, "poison", torch.zeros(3)).sum()


class FirstAtLast(Scaled):
    """A buffer that is None until the first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x):
        self.scale = torch.ones(3) if self.scale is None else self.scale
        return super().forward(x)


class Taken(Scaled):
    """A forward that is not finite takes its buffer away."""

    def forward(self, x):
        if not x.isfinite().all():
            del self.scale
            return self.linear(x)
        return super().forward(x)


class Codebook(Scaled):
    """Counts rows in whole numbers and keeps an assignment of them, as vector quantization does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("used", torch.zeros(3, dtype=torch.bool), persistent=False)

    def move(self, new):
        self.seen += 1
        self.used |= new.isnan()
        self.scale.copy_(torch.where(self.used, math.nan, new) / self.seen)


WAYS = [
    *(Scaled, Assigned, ThroughData, DataAssigned, WrittenThenAssigned, Expanded, Grows, Registered, FirstAtLast),
    *(Taken, Codebook),
]


class Centered(nn.Module):
    """A loss with a running center."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, output, target):
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return ((output - self.center - target) ** 2).mean()


def built(cls):
    torch.manual_seed(0)
    model = cls()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def by_hand(model, optimizer, loss, data):
    """The loop of the textbooks."""
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def tensors(*modules):
    return [
        (name, tensor) for module in modules for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]


def same(one, other):
    return [n for n, _ in one] == [n for n, _ in other] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("cls", WAYS)
def test_a_skipped_update_restores_every_buffer_that_its_forward_has_changed(cls):
    model, optimizer = built(cls)
    loss = Centered()
    trainer = Trainer(model, optimizer, loss, on_nonfinite="skip", console=False)
    result = trainer.fit(POISONED, epochs=1)
    assert (result.updates, result.skipped) == (6, 1)
    expected, other = built(cls)
    centered = Centered()
    by_hand(expected, other, centered, [pair for i, pair in enumerate(DATA) if i != BAD])
    assert same(tensors(model, loss), tensors(expected, centered))


def test_buffers_of_layers_that_begin_epoch_adds_are_restored():
    class GrowsAtEpochOne(Trainer):
        def begin_epoch(self, epoch):
            if epoch:
                self.model.append(Scaled())
                self.model.append(nn.Linear(1, 3))
                self.optimizer.add_param_group({"params": [*self.model[1].parameters(), *self.model[2].parameters()]})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(x, x) for x, _ in POISONED]
    result = GrowsAtEpochOne(model, optimizer, nn.MSELoss(), on_nonfinite="skip", console=False).fit(data, epochs=2)
    assert result.skipped == 2
    assert all(tensor.isfinite().all() for _, tensor in tensors(model))


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations make, views and results of the model's arithmetic apart."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func._overloadpacket in (
            torch.ops.aten.clone,
            torch.ops.aten.empty_like,
            torch.ops.aten._to_copy,
        )
        return func(*args, **(kwargs or {}))


class Remembers(Trainer):
    def begin_epoch(self, epoch):
        self.state.setdefault("queue", [torch.zeros(8, 3), {"mean": torch.zeros(3)}])

    def training_step(self, batch):
        self.state["queue"][0][0] += batch[0].mean(0)
        self.state["queue"][1]["mean"] = batch[0].mean(0)
        return super().training_step(batch)


@pytest.mark.parametrize("cls", [Scaled, Assigned])
def test_the_storage_for_buffers_and_state_is_allocated_once(cls):
    def made(batches):
        model, optimizer = built(cls)
        trainer = Remembers(model, optimizer, nn.MSELoss(), on_nonfinite="skip", console=False)
        with Allocations() as counted:
            trainer.fit(DATA[:1] * batches, epochs=1)
        return counted.copies

    made(2)
    assert made(5) == made(15)


def test_state_comes_back_as_it_was_and_shares_nothing_with_the_copy():
    seen = []

    class Sees(Remembers):
        def training_step(self, batch):
            seen.append([self.state["queue"][0].clone(), self.state["queue"][1]["mean"].clone()])
            return super().training_step(batch)

    model, optimizer = built(Scaled)
    data = [POISONED[i] for i in (0, BAD, 1, BAD, BAD, 2)]
    assert Sees(model, optimizer, nn.MSELoss(), on_nonfinite="skip", console=False).fit(data, epochs=1).skipped == 3
    for before, after in ((1, 2), (3, 4), (4, 5)):
        assert all(torch.equal(a, b) for a, b in zip(seen[before], seen[after], strict=True))
    assert all(tensor.isfinite().all() for pair in seen for tensor in pair)
