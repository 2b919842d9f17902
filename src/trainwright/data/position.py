"""Where an iterator stands: batches skipped, epochs without a batch, generators at an epoch's start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from trainwright.base.errors import DataError, message


def skipped(iterator: Iterator[Any], skip: int, name: str) -> Iterator[Any]:
    """Read `skip` batches of `iterator` at once and drop them."""
    dropped = sum(1 for _ in islice(iterator, skip))
    if dropped < skip:
        raise DataError(
            message(
                f"{name} ended while the batches were skipped that the run has trained on already",
                have=f"{dropped} batches",
                want=f"at least {skip}, as when the state was saved",
                fix="give the data that the run was started with",
            )
        )
    return iterator


def opened(iterator: Iterator[Any], skip: int, *, name: str, complaint: Callable[[], DataError]) -> Iterator[Any]:
    """`iterator` without its first `skip` batches, raising `complaint` where the epoch has not one."""
    if skip:
        return skipped(iterator, skip, name)
    # A chain: no Python frame after the first batch, and nothing is read before it is asked for.
    return chain(_first(iterator, complaint), iterator)


def _first(iterator: Iterator[Any], complaint: Callable[[], DataError]) -> Iterator[Any]:
    for batch in iterator:
        yield batch
        return
    raise complaint()


def length_of(data: Any) -> int | None:
    """`len(data)`, or None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def tell_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch(epoch)` once on each of `owners` that has it."""
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)


class Generators:
    """The `torch.Generator`s that loaders and samplers hold, as they stood at the start of the epoch in hand.

    Resumed inside the saved epoch, the order is drawn again from its start; resumed at a later epoch, the
    generators go on from where they stood when the state was saved.
    """

    def __init__(self, owners: dict[str, Any]) -> None:
        self._found: dict[str, torch.Generator] = {}
        for name, owner in owners.items():
            for key, value in getattr(owner, "__dict__", {}).items():
                known = any(value is one for one in self._found.values())
                # The default generator belongs to the process, whose state is kept with the run's.
                if isinstance(value, torch.Generator) and value is not torch.default_generator and not known:
                    self._found[f"{name}.{key}"] = value
        self._epoch = -1
        self._start = self._states()
        self._loaded: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch in hand, or the loaded one that is not begun yet."""
        return self._epoch if self._loaded is None else int(self._loaded["epoch"])

    @property
    def found(self) -> list[torch.Generator]:
        """The generators themselves."""
        return list(self._found.values())

    def begin(self, epoch: int) -> None:
        """Note the start of `epoch`, after going back to a loaded state where there is one."""
        if self._loaded is not None:
            states = self._loaded["start" if self._loaded["epoch"] == epoch else "now"]
            for name, generator in self._found.items():
                generator.set_state(states[name])
            self._loaded = None
        self._epoch, self._start = epoch, self._states()

    def state_dict(self) -> dict[str, Any]:
        """The epoch in hand (-1 before the first), the states at its start, and the states now."""
        return self._loaded or {"epoch": self._epoch, "start": dict(self._start), "now": self._states()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved state; it takes effect when the next epoch begins."""
        if set(tree["start"]) != set(self._found):
            raise DataError(
                message(
                    "the saved state belongs to another loader: its random generators differ",
                    have=", ".join(sorted(self._found)) or "no generator",
                    want=", ".join(sorted(tree["start"])) or "no generator",
                    fix="build loader and sampler as when the state was saved",
                )
            )
        self._loaded = tree

    def _states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._found.items()}
