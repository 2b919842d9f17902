"""The observer of many tests: it keeps what every update has reported."""

from __future__ import annotations

from trainwright import Observer
from trainwright.observers import Update


class Records(Observer):
    """Keeps the record of every update."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def on_update(self, update: Update) -> None:
        self.updates.append(update)

    @property
    def losses(self) -> list[float]:
        return [update.loss for update in self.updates]

    @property
    def rates(self) -> list[float | None]:
        return [update.lr for update in self.updates]
