"""What the steps of a recording have noted and fed: tensors that every replay computes anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from trainwright.run.ledger import Ledger
from trainwright.run.numbers import Entry
from trainwright.runtime.device import change
from trainwright.slots.metrics import Meters
from trainwright.slots.window import Window


class Heard:
    """Hears what metrics would be fed."""

    def __init__(self, meters: Meters) -> None:
        self.reads_output = meters.reads_output
        self._fed: list[tuple[Any, Any, int]] = []

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Keep what is to be fed; its tensors hold other values when it is."""
        self._fed.append((_changed(output, torch.Tensor.detach), _changed(target, torch.Tensor.detach), rows))

    def feed(self, meters: Meters) -> None:
        """Feed it as it is now, in copies: a metric may keep what it is given."""
        for output, target, rows in self._fed:
            meters.update(_changed(output, torch.clone), _changed(target, torch.clone), rows)


class Noted(NamedTuple):
    """What was taken down apart: numbers, and what metrics were to be fed."""

    entries: list[Entry]
    heard: Heard | None

    def let_go(self) -> None:
        """Keep the numbers alone, and nothing of what they were computed by."""
        self.entries[:] = [
            (name, value.detach() if isinstance(value, torch.Tensor) else value, count, summed)
            for name, value, count, summed in self.entries
        ]


@contextmanager
def noted_apart(ledger: Ledger, window: Window) -> Iterator[Noted]:
    """Take down apart, in what is yielded, what is run inside with `window` in hand; metrics are not fed."""
    kept = ledger._entries, ledger.window, ledger.noted, ledger.noting, ledger.meters
    sums = dict(ledger._sums), dict(ledger._counts), dict(ledger.values), dict(ledger._earlier)
    last = ledger.loss, ledger.counted
    noted = Noted([], None if ledger.meters is None else Heard(ledger.meters))
    ledger._entries, ledger.window, ledger.noted, ledger.noting = noted.entries, window, False, True
    ledger.meters = cast(Meters | None, noted.heard)
    try:
        yield noted
    finally:
        noted.let_go()
        ledger._entries, ledger.window, ledger.noted, ledger.noting, ledger.meters = kept
        # What is judged at once is added up at once.
        ledger._sums, ledger._counts, ledger.values, ledger._earlier = sums
        ledger.loss, ledger.counted = last


def note_again(ledger: Ledger, noted: Noted) -> None:
    """Take down what was noted apart, whose tensors were computed anew since."""
    ledger._entries += noted.entries
    ledger.noted = True
    if noted.heard is not None and ledger.meters is not None:
        noted.heard.feed(ledger.meters)


def _changed(value: Any, each: Any) -> Any:
    return change(value, torch.device("cpu"), each)
