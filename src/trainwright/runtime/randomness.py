"""The random state of the process as plain data: Python, NumPy, torch, and each accelerator in use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Every global random state, as a tree of plain data and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back a state that `random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def seed(number: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Start every global random state, and that of `generators`, from one number."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    for generator in generators:
        generator.manual_seed(number)


@contextmanager
def unmoved(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Leave every global random state, and that of `generators`, as it was found, whatever is drawn inside."""
    state = random_state()
    own = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        set_random_state(state)
        for generator, before in own:
            generator.set_state(before)
