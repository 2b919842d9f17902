"""Runs whose updates are recorded and replayed, on the CPU, beside the same ones without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from laws.emulated_graph import EmulatedGraph, _is_recording, emulate
from laws.late_runs import OPTIMIZERS, Watches, data, net, on_the_cpu
from trainwright import Fast, Trainer
from trainwright.slots.losses import KnownLoss


class Ran(NamedTuple):
    """What a fit has left."""

    trainer: Trainer[Any]
    records: list[Any]
    error: Exception | None
    replays: list[int]
    """How often each recording was replayed."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return self.trainer.model.state_dict()

    @property
    def moments(self) -> list[Any]:
        """The states of the optimizers, without those that no step has moved yet: zeros, which stand for none."""
        states = [optimizer.state_dict()["state"] for optimizer in self.trainer.optimizers.values()]
        return [
            {key: own for key, own in each.items() if any(v is not None and bool(torch.any(v)) for v in own.values())}
            for each in states
        ]

    @property
    def history(self) -> list[dict[str, float]]:
        """The rows of the epochs, without the time that they took."""
        return [{name: value for name, value in row.items() if "second" not in name} for row in self.trainer.history]


def fitted(
    graphs: Any,
    *,
    kind: type[Trainer[Any]] = Trainer,
    model: Callable[[], nn.Module] = net,
    optimizer: str | Callable[..., Any] = "adamw",
    loss: Any = None,
    batches: Any = data,
    val: Any = None,
    watched: bool = True,
    observers: Any = (),
    fits: Any = ({"epochs": 5},),
    prepare: Callable[[Trainer[Any]], None] | None = None,
    **slots: Any,
) -> Ran:
    """Fit with `Fast(cuda_graphs=graphs)`, updates judged late; `watched`: with an observer told of each of them."""
    told = Watches()
    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu(patch)
        emulate(patch)
        _count_on_device(patch)
        torch.manual_seed(3)
        made, rows = model(), batches()
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        loss = nn.CrossEntropyLoss() if loss is None else copy.deepcopy(loss)
        seen = [told] if watched else []
        fast = Fast(cuda_graphs=graphs)
        trainer = kind(
            made, make(made.parameters()), loss, console=False, fast=fast, observers=[*seen, *observers], **slots
        )
        told.trainer, error = trainer, None
        torch.manual_seed(4)
        if prepare is not None:
            prepare(trainer)
        try:
            for each in fits:
                trainer.fit(rows, val, **each)
        except Exception as raised:
            error = raised
        return Ran(trainer, told.records, error, [graph.replays for graph in EmulatedGraph.made])


def check_same(captured: Ran, eager: Ran, *, exact: bool = True, errors: bool = False) -> None:
    """Assert that two runs have left the same, and told the same, bit for bit where `exact`."""
    assert (str(captured.error) if errors else captured.error) == (str(eager.error) if errors else eager.error)
    for name in ("weights", "moments", "history"):
        alike(getattr(captured, name), getattr(eager, name), exact=exact)
    alike([_numbers(one) for one in captured.records], [_numbers(one) for one in eager.records], exact=exact)
    ours, theirs = captured.trainer.result, eager.trainer.result
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert (ours.updates, ours.skipped, ours.stopped) == (theirs.updates, theirs.skipped, theirs.stopped)


def both(*, exact: bool = True, errors: bool = False, least: int = 1, graphs: Any = "require", **how: Any) -> Ran:
    """Fit captured and eager, assert that both are the same, and that recordings were replayed `least` times."""
    captured, eager = fitted(graphs, **how), fitted(False, **how)
    check_same(captured, eager, exact=exact, errors=errors)
    assert sum(captured.replays) >= least, captured.trainer.fast_path
    assert not eager.replays
    return captured


def _count_on_device(patch: pytest.MonkeyPatch) -> None:
    """Have targets inside a recording be counted as those on a device are: the library counts the host's by NumPy."""
    real = KnownLoss.count

    def count(self: KnownLoss, target: torch.Tensor) -> Any:
        if not _is_recording() or self.each_element or target.is_floating_point():
            return real(self, target)
        valid = target != self._options.get("ignore_index", -100)
        if self._weight is None:
            return torch.count_nonzero(valid)
        return torch.where(valid, self._weight[torch.where(valid, target, 0)].double(), 0.0).sum()

    patch.setattr(KnownLoss, "count", count)


def _numbers(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}


def alike(a: Any, b: Any, *, exact: bool = True) -> None:
    """Assert that two nested values are the same, bit for bit where `exact`; NaN is NaN."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            alike(a[key], b[key], exact=exact)
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            alike(x, y, exact=exact)
    elif isinstance(a, float) and (not exact or a != a):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6, nan_ok=True)
    else:
        assert a == b
