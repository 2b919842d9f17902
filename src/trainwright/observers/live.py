"""The progress bar of the current epoch on a terminal or in a notebook: one line, cleared before other output."""

from __future__ import annotations

import io
import threading
import time
from typing import Any, TextIO

from tqdm import tqdm

from trainwright.core.plan import Plan
from trainwright.core.records import Result, Update, Validation
from trainwright.observers.table import number, printable, rate
from trainwright.protocols import Observer

_BAR, _LEAST_BAR = 24, 8


class LiveBar(Observer):
    """A progress bar over the updates of the current epoch, with loss, learning rate and remaining time of the run.

    Redrawn at most ten times a second on a terminal, and four times a second in a notebook.
    """

    def __init__(self, stream: TextIO, *, width: int = 100) -> None:
        self._stream = stream
        self._width = width
        self._plan = Plan()
        self._bar: _Bar | None = None
        self._epoch = -1
        self._earlier = self._done = self._seen = 0
        """Updates of finished stages, of this stage and of this `fit`."""
        self._began = 0.0

    def on_fit_start(self, plan: Plan) -> None:
        """Store the plan: the number of epochs, and of updates per epoch."""
        self._plan = plan
        self._seen, self._began = 0, time.monotonic()
        self._close()
        if isinstance(self._stream, CellOutput):
            self._stream.begin()

    def on_update(self, update: Update) -> None:
        """Advance the bar. Text is formatted only when the bar is redrawn."""
        self._seen += 1
        self._earlier = 0 if update.update <= self._earlier else self._earlier  # the resume of a failed stage
        self._done = update.update - self._earlier
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
        """Close the bar, and clear its line, on which a terminal may have written ^C."""
        self._close()
        if not isinstance(self._stream, CellOutput):
            self._stream.write(f"\r{' ' * (self._width - 1)}\r")
        self._earlier += result.updates

    def seconds_left(self) -> float | None:
        """Return the remaining seconds of the run at its speed so far, with validations; None if its end is unknown."""
        elapsed, total = time.monotonic() - self._began, self._plan.updates
        by_updates = [(total - self._done) * elapsed / self._seen] if total is not None and self._seen else []
        by_time = [] if self._plan.max_seconds is None else [self._plan.max_seconds - elapsed]
        return max(0.0, min([*by_updates, *by_time])) if by_updates or by_time else None

    def _opened(self, epoch: int) -> _Bar:
        self._close()
        epochs, total = self._plan.epochs, self._plan.updates_in(epoch)
        name = f"{epoch + 1}/{epochs}" if epochs is not None and epoch < epochs else f"{epoch + 1}"
        self._bar = _Bar(
            total=total,
            file=self._stream,
            ncols=self._width,
            leave=False,
            mininterval=0.25 if isinstance(self._stream, CellOutput) else 0.1,
            miniters=1,  # tqdm's own estimate skips redraws when the rate drops
            delay=0.2,  # a very short epoch draws nothing
            ascii=printable("█", self._stream.encoding) != "█",
        )
        self._bar.name, self._bar.owner = name, self
        self._epoch = epoch
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class CellOutput(io.StringIO):
    """The stream of a bar in a notebook: an output of the cell with one line, which each write replaces."""

    encoding = "utf-8"

    def begin(self) -> None:
        """Show the next line in a new output of the running cell."""
        self._handle: Any = None
        self._line = ""

    def write(self, text: str) -> int:
        """Replace the line. Carriage returns and blanks that clear a terminal line are ignored."""
        line = text.strip()
        if line != self._line and (line or self._handle is not None):
            from IPython.display import display

            self._line, data = line, {"text/plain": line}
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(data, raw=True)
        return len(text)


def write_line(text: str) -> None:
    """Print a line on standard output, above a progress bar if there is one."""
    tqdm.write(text)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar without a monitor thread. Formats its line only when drawn, no wider than the terminal."""

    monitor_interval = 0
    name = ""
    latest: Update | None = None
    owner: LiveBar | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """The fields that tqdm formats the line from."""
        fields = dict(super().format_dict)
        encoding, parts = self.fp.encoding, self._parts()
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

    def _parts(self) -> list[str]:
        """Return the texts after the bar. The last ones are dropped first if space is short."""
        parts = [f"{self.n}/{self.total}" if self.total else f"{self.n} updates"]
        if self.latest is not None:
            parts += [f"loss {number(self.latest.loss)}", f"lr {rate(self.latest.lr)}"]
        left = None if self.owner is None else self.owner.seconds_left()
        return parts if left is None else [*parts, f"{self.format_interval(left)} left"]


_Bar.set_lock(threading.RLock())
