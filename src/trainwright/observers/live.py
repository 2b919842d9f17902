"""The running epoch on a terminal: one line, redrawn by time, gone before anything else is printed."""

from __future__ import annotations

import threading
from typing import Any, TextIO

from tqdm import tqdm

from trainwright.base.contracts import Observer
from trainwright.base.plan import Plan
from trainwright.base.records import Result, Update, Validation
from trainwright.observers.table import number, printable, rate


class LiveBar(Observer):
    """A bar of the updates of the running epoch, with loss and learning rate; redrawn at most ten times a second."""

    def __init__(self, stream: TextIO, *, width: int = 100) -> None:
        self._stream = stream
        self._width = width
        self._plan = Plan()
        self._bar: _Bar | None = None
        self._epoch = -1

    def on_fit_start(self, plan: Plan) -> None:
        """Keep the plan: how many epochs, how many updates in each."""
        self._plan = plan
        self._close()

    def on_update(self, update: Update) -> None:
        """Move the bar; text is made only when it is redrawn."""
        bar = self._bar
        if bar is None or self._epoch != update.epoch:
            bar = self._opened(update.epoch)
        bar.latest = update
        bar.update()

    def on_validate(self, record: Validation) -> None:
        """Make room for the row of a validation."""
        if self._bar is not None:
            self._bar.clear()

    def on_epoch(self, record: Validation) -> None:
        """Make room for the row of an epoch."""
        self._close()

    def on_fit_end(self, result: Result) -> None:
        """Leave nothing behind."""
        self._close()

    def _opened(self, epoch: int) -> _Bar:
        self._close()
        epochs, total = self._plan.epochs, self._plan.updates_in(epoch)
        name = f"{epoch + 1}/{epochs}" if epochs is not None and epoch < epochs else f"{epoch + 1}"
        rest = "{bar:24} {n_fmt}/{total_fmt} · {numbers} · {remaining} left" if total else "{n_fmt} updates · {numbers}"
        self._bar = _Bar(
            total=total,
            file=self._stream,
            ncols=self._width,
            leave=False,
            miniters=1,  # tqdm's own guess starves where the pace changes
            delay=0.2,  # an epoch that is over at once draws nothing
            ascii=printable("█", self._stream.encoding) != "█",
            bar_format=printable(f" epoch {name} {rest}", self._stream.encoding),
        )
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
    """A tqdm bar that asks for its numbers when it is drawn, with no thread that watches it."""

    monitor_interval = 0
    latest: Update | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """What `bar_format` may name."""
        fields = dict(super().format_dict)
        if self.latest is not None:
            text = f"loss {number(self.latest.loss)} · lr {rate(self.latest.lr)}"
            fields["numbers"] = printable(text, getattr(self.fp, "encoding", None))
        else:
            fields["numbers"] = ""
        return fields


_Bar.set_lock(threading.RLock())
