"""Optimizers that scale each layer by norms make the updates of one process where each process has shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from distributed.fsdp_cases import PAIRS, State, differ, plain_loop, sharded_loop
from distributed.pool import pool
from trainwright.optim import Lamb, Lars, muon, param_groups


def lars(model: nn.Module, **settings: Any) -> Any:
    return Lars(param_groups(model, lr=1.0, weight_decay=0.1), trust=0.05, **settings)


def lamb(model: nn.Module, **settings: Any) -> Any:
    return Lamb(param_groups(model, lr=0.05, weight_decay=0.1), **settings)


def muons(model: nn.Module) -> Any:
    return muon(lr=0.05)(model)


OPTIMIZERS: dict[str, Any] = {
    "lars": lars,
    "lars for all": partial(lars, adapt="all", nesterov=True),
    "lamb": lamb,
    "lamb for all": partial(lamb, adapt="all", clamp=(0.1, 1.0)),
    "muon": muons,
}


@contextmanager
def in_float64() -> Iterator[None]:
    """Muon without its rounding to bfloat16, which is made otherwise of shards, and is no small one."""
    real = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = real  # type: ignore[method-assign]


def sharded(name: str) -> tuple[State, list[float]]:
    with in_float64():
        return sharded_loop(PAIRS, make=OPTIMIZERS[name])


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "muon" or hasattr(torch.optim, "Muon")])
def test_shards_make_the_updates_of_one_process(name: str) -> None:
    with in_float64():
        expected, _ = plain_loop(PAIRS, make=OPTIMIZERS[name])
    (state, _), _ = pool(2).run(sharded, name)  # the whole weights are on the first process alone
    assert differ(state, expected) < 1e-12
