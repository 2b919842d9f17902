"""The progress bar of the running epoch on a terminal: one line, cleared before anything else is printed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from trainwright.core.plan import Plan
from trainwright.core.records import Result, Update, Validation
from trainwright.observers.table import number, printable, rate
from trainwright.protocols import Observer

_BAR, _LEAST_BAR = 24, 8


class LiveBar(Observer):
    """A bar of the updates of the running epoch, with loss and learning rate; redrawn at most ten times a second."""

    def __init__(self, stream: TextIO, *, width: int = 100) -> None:
        self._stream = stream
        self._width = width
        self._plan = Plan()
        self._bar: _Bar | None = None
        self._epoch = -1

    def on_fit_start(self, plan: Plan) -> None:
        """Store the plan: the number of epochs and of updates in each."""
        self._plan = plan
        self._close()

    def on_update(self, update: Update) -> None:
        """Advance the bar; text is formatted only when it is redrawn."""
        bar = self._bar
        if bar is None or self._epoch != update.epoch:
            bar = self._opened(update.epoch)
        bar.latest = update
        bar.update()

    def on_validate(self, record: Validation) -> None:
        """Clear the bar for the row of a validation."""
        if self._bar is not None:
            self._bar.clear()

    def on_epoch(self, record: Validation) -> None:
        """Close the bar before the row of an epoch."""
        self._close()

    def on_fit_end(self, result: Result) -> None:
        """Close the bar."""
        self._close()

    def _opened(self, epoch: int) -> _Bar:
        self._close()
        epochs, total = self._plan.epochs, self._plan.updates_in(epoch)
        name = f"{epoch + 1}/{epochs}" if epochs is not None and epoch < epochs else f"{epoch + 1}"
        self._bar = _Bar(
            total=total,
            file=self._stream,
            ncols=self._width,
            leave=False,
            miniters=1,  # tqdm's own estimate skips redraws when the rate drops
            delay=0.2,  # a very short epoch draws nothing
            ascii=printable("█", self._stream.encoding) != "█",
        )
        self._bar.name = name
        self._epoch = epoch
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def write_line(text: str) -> None:
    """Print a line on standard output above any bar that is being drawn."""
    tqdm.write(text)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that formats its line when it is drawn, no wider than the terminal, without tqdm's monitor thread."""

    monitor_interval = 0
    name = ""
    latest: Update | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """The fields that tqdm formats the line from."""
        fields = dict(super().format_dict)
        encoding, parts = self.fp.encoding, self._parts(fields)
        head = f" epoch {self.name} "
        widest = fields["ncols"] - len(head)
        least = _LEAST_BAR + 1 if self.total else 0
        while len(parts) > 1 and len(" · ".join(parts)) + least > widest:
            parts.pop()
        tail = " · ".join(parts)
        room = min(_BAR, widest - len(tail) - 1) if self.total else 0
        fields["head"], fields["tail"] = printable(head, encoding), printable(tail, encoding)
        fields["bar_format"] = "{head}" + (f"{{bar:{room}}} " if room > 0 else "") + "{tail}"
        return fields

    def _parts(self, fields: Mapping[str, Any]) -> list[str]:
        """Return the texts after the bar; the last are dropped first."""
        n, elapsed = self.n, fields["elapsed"]
        parts = [f"{n}/{self.total}" if self.total else f"{n} updates"]
        if self.latest is not None:
            parts += [f"loss {number(self.latest.loss)}", f"lr {rate(self.latest.lr)}"]
        pace = fields["rate"] or (n / elapsed if elapsed else 0)
        if self.total and pace:
            parts.append(f"{self.format_interval(max(0, self.total - n) / pace)} left")
        return parts


_Bar.set_lock(threading.RLock())
