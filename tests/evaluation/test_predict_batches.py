"""`predict_batches` yields what `predict` joins; between two outputs the trainer is as it was left."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainwright import EMA, DataError, Probe, StepOutput, Trainer, Updates, batches

X = torch.randn(41, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """Draws in eval mode too, and notes its modes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        output: torch.Tensor = self.norm(self.linear(x)) + torch.rand(len(x), 3)
        return output


class Draws(Dataset[Any]):
    """Draws from all three generators of the process."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return X[row] + torch.rand(()) + float(np.random.rand()) + random.random()


def made(cls: Any = Trainer, model: Any = None, **slots: Any) -> Any:
    torch.manual_seed(0)
    model = model or Net()
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False, **slots)


SOURCES: dict[str, Any] = {
    "batches": lambda: batches(X, 8),
    "loader": lambda: DataLoader(TensorDataset(X), 8),
    "loader that shuffles": lambda: DataLoader(TensorDataset(X), 8, shuffle=True),
    "loader that draws": lambda: DataLoader(Draws(), 4, shuffle=True),
    "loader with a generator": lambda: DataLoader(Draws(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "loader with workers": lambda: DataLoader(Draws(), 4, shuffle=True, num_workers=2),
    "list": lambda: list(X.split(8)),
}


def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


@pytest.mark.parametrize("form", SOURCES)
def test_it_yields_the_outputs_of_predict_whatever_is_drawn_in_between(form: str) -> None:
    trainer = made()
    seeded()
    expected = trainer.predict(SOURCES[form]())
    seeded()
    outputs = []
    for output in trainer.predict_batches(SOURCES[form]()):
        outputs.append(output)
        torch.rand(7), np.random.rand(3), random.random()
    assert len(outputs) > 3
    assert torch.equal(torch.cat(outputs), expected)


def everything(trainer: Any) -> Any:
    modes = [module.training for module in trainer.model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    weights = [tensor.clone() for tensor in trainer.model.state_dict().values()]
    state = {name: value.clone() for name, value in trainer.state.items()}
    return modes, grads, weights, state, torch.get_rng_state(), str(np.random.get_state()), random.getstate()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


class Counts(Trainer[Any]):
    def predict_step(self, batch: Any) -> Any:
        self.state["calls"] += 1
        return StepOutput(None, super().predict_step(batch) * 0 + self.state["calls"])


@pytest.mark.parametrize("form", SOURCES)
def test_the_trainer_is_as_it_was_between_two_outputs_and_after_a_drop_half_way(form: str) -> None:
    trainer = made(Counts)
    trainer.state["calls"] = torch.zeros(())
    trainer.model.norm.eval()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    data, before = SOURCES[form](), everything(trainer)
    iterator = trainer.predict_batches(data)
    for expected in (1.0, 2.0, 3.0):
        assert next(iterator).unique().tolist() == [expected]  # its own copy of the state goes on
        assert torch.is_grad_enabled() and same(everything(trainer), before)
    iterator.close()
    assert same(everything(trainer), before)


class PredictsInside(Trainer[Any]):
    """Iterates predictions while it trains on averaged weights."""

    outputs: list[Any]

    def after_update(self) -> None:
        if self.progress.updates == 3:
            self.iterator = self.predict_batches(X, batch_size=10)
        if self.progress.updates >= 3:
            before = [p.detach().clone() for p in self.model.parameters()]
            self.outputs.append((self.averaged(), next(self.iterator)))
            assert all(map(torch.equal, before, self.model.parameters()))
            assert self.model.training

    def averaged(self) -> Any:
        return self.predict(X, batch_size=10)


def test_during_a_fit_each_batch_runs_with_the_averaged_weights_of_that_moment_and_training_is_the_same() -> None:
    model = nn.Linear(4, 1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = made(PredictsInside, model, average=EMA(0.5))
    trainer.outputs = []
    trainer.fit((X, Y), batch_size=6, epochs=1)
    at = [0, 10, 20, 30, 40]
    assert len(trainer.outputs) == 5
    for begin, (complete, output) in zip(at, trainer.outputs, strict=True):
        assert torch.equal(output, complete[begin : begin + 10])
    plain = nn.Linear(4, 1)
    plain.load_state_dict(weights)
    other = made(Trainer, plain, average=EMA(0.5))
    other.fit((X, Y), batch_size=6, epochs=1)
    assert torch.equal(other.model.weight, trainer.model.weight)


def test_a_pass_goes_on_with_weights_that_were_trained_in_between() -> None:
    trainer = made(model=nn.Linear(4, 1))
    iterator = trainer.predict_batches(X, batch_size=20)
    first = next(iterator)
    trainer.fit((X, Y), batch_size=41, epochs=1)
    assert torch.equal(next(iterator), trainer.predict(X[20:40]))
    assert not torch.equal(first, trainer.predict(X[:20]))


def test_it_is_a_probes_too() -> None:
    found: list[Any] = []
    trainer = made(
        model=nn.Linear(4, 1),
        observers=[Probe(lambda trainer: found.extend(trainer.predict_batches(X, batch_size=20)), every=Updates(2))],
    )
    trainer.fit((X, Y), batch_size=20, epochs=1)
    assert [len(output) for output in found] == [20, 20, 1]


def test_nothing_is_read_before_the_first_output_is_asked_for_and_mistakes_come_at_the_call() -> None:
    read: list[int] = []

    def stream() -> Any:
        for number in range(3):
            read.append(number)
            yield X[:2]

    trainer = made()
    iterator = trainer.predict_batches(stream())
    assert read == []
    next(iterator)
    assert read == [0]
    with pytest.raises(DataError, match="no source of batches"):
        trainer.predict_batches(3)
    with pytest.raises(DataError, match="exhausted"):
        list(trainer.predict_batches(iter([])))
    assert [len(output) for output in trainer.predict_batches(X, batch_size=8, max_batches=2)] == [8, 8]


class Fails(Trainer[Any]):
    def predict_step(self, batch: Any) -> Any:
        raise RuntimeError("mine")


def test_an_error_of_a_step_leaves_no_trace() -> None:
    trainer = made(Fails)
    before = everything(trainer)
    with pytest.raises(RuntimeError, match="mine"):
        next(trainer.predict_batches(X))
    assert same(everything(trainer), before)
