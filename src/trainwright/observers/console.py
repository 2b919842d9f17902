"""Prints the plan of a run, one row per validation and epoch, and a summary at its end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TextIO

import torch

from trainwright.core.checks import check_whole
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.records import Result, Validation
from trainwright.core.suggestions import suggests
from trainwright.observers.table import (
    ConsoleTable,
    amount,
    duration,
    is_set_loss,
    joined,
    number,
    printable,
    sparkline,
)
from trainwright.protocols import Observer

if TYPE_CHECKING:
    from trainwright.observers.throughput import Speed

WIDEST = 100
"""Maximum width of a line in characters."""
MIN_REPORTED_WAIT = 1.0
"""Minimum seconds of waiting, for saves or for data, that the summary reports."""
MIN_REPORTED_SHARE = 0.25
"""Minimum share of time spent waiting for data that the summary reports."""


@suggests
class Console(Observer):
    """Prints the plan before a run, a table during it, and a summary after it.

    Prints nothing per update, and no control characters. A terminal also shows a progress bar of the epoch.

    Args:
        stream: The stream to print to. None: standard output.
        width: The width in characters. None: the width of the terminal, at most 100; 100 without a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        if width is not None:
            check_whole(width, f"Console(width={width!r})", least=60, what="a number of characters")
        self._stream = stream
        self._width = width
        self._table = ConsoleTable(self.width)
        self._last: tuple[int, int] | None = None
        self._plan = Plan()
        self._speeds: list[Speed] = []
        """Speeds since the last printed speed line."""
        self._noted = False
        """Whether a missing number was explained in this run already."""
        self._seconds = self._data_seconds = 0.0
        """Seconds of training so far; the part of them spent waiting for data."""

    @property
    def stream(self) -> TextIO:
        """The stream to print to."""
        return sys.stdout if self._stream is None else self._stream

    @property
    def width(self) -> int:
        """Maximum width of a line in characters."""
        if self._width is not None:
            return self._width
        if not self.stream.isatty():
            return WIDEST
        return max(60, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))

    def on_fit_start(self, plan: Plan) -> None:
        """Print the plan of the run."""
        self._plan, self._table, self._last = plan, ConsoleTable(self.width, watched=plan.watched), None
        self._speeds, self._noted = [], False
        self._seconds = self._data_seconds = 0.0
        if not plan.finished:
            self._print(*header(plan, self.width), "")

    def on_speed(self, speed: Speed) -> None:
        """Store the speed for the line after the row of the epoch."""
        self._speeds.append(speed)

    def on_validate(self, record: Validation) -> None:
        """Print a row."""
        self._row(record)

    def on_epoch(self, record: Validation) -> None:
        """Print a row, unless the validation at the end of the epoch has printed it, and the speed of the epoch."""
        self._row(record)
        self._speed()

    def on_fit_end(self, result: Result) -> None:
        """Print sparklines of losses and monitored numbers, the end, the best, and the final weights."""
        finished, watched = self._plan.finished, self._plan.watched
        self._speed()
        if finished:
            self._print(*at_once(finished, result, self.width))
        else:
            data_share = self._data_seconds / self._seconds if self._data_seconds >= MIN_REPORTED_WAIT else 0.0
            self._print(*footer(result, self.width, watched=watched, data_share=data_share))

    def _row(self, record: Validation) -> None:
        if record.final or self._last != (record.epoch, record.update):
            self._last = (record.epoch, record.update)
            self._seconds += record.seconds
            self._data_seconds += record.waiting * record.seconds
            self._print(*self._table.lines(record), *record.notes)

    def _speed(self) -> None:
        if self._speeds:
            from trainwright.observers.throughput import speed_lines

            self._print(*speed_lines(self._speeds, self.width, notes=not self._noted))
            self._speeds, self._noted = [], True

    def _print(self, *lines: str) -> None:
        encoding = getattr(self.stream, "encoding", None)
        self.stream.write("".join(printable(line.rstrip(), encoding) + "\n" for line in lines))
        self.stream.flush()


def console_observers(console: bool | Console) -> list[Observer]:
    """Return the observers of the setting `console`: none, the console, or a progress bar and the console.

    The bar is drawn on a terminal and in a notebook.
    """
    if console is False:
        return []
    if console is True:
        console = Console()
    if not isinstance(console, Console):
        raise SettingError(f"console={console!r}", want="True, False or Console(...)")
    is_cell = console.stream is sys.stdout and _in_notebook()
    if not console.stream.isatty() and not is_cell:
        return [console]
    from trainwright.observers.live import CellOutput, LiveBar

    return [LiveBar(CellOutput() if is_cell else console.stream, width=console.width), console]


def _in_notebook() -> bool:
    """Return whether the process is a notebook kernel. IPython on a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def header(plan: Plan, width: int = WIDEST) -> list[str]:
    """Return the lines on the plan of a run."""
    where = plan.device
    if where == "cpu":
        threads = torch.get_num_threads()
        where += f", {threads} thread{'s' if threads > 1 else ''}"
    parts = [_versions(), where]
    if plan.precision and plan.precision != Plan().precision:
        parts.append(plan.precision)
    if plan.model:
        frozen = f", {amount(plan.frozen)} frozen" if plan.frozen else ""
        parts.append(f"{plan.model} {amount(plan.parameters)} parameters{frozen}")
    lines = joined(" · ".join(parts).split(" · "), width)
    held_out = [f"val {one}" for one in plan.val.split("; ") if one]
    lines += joined([_train(plan), *_arithmetic(plan), *held_out], width)
    lines += joined(plan.settings, width) if plan.settings else []
    return lines + [line for note in plan.notes for text in note.splitlines() for line in joined([text], width)]


def footer(result: Result, width: int = WIDEST, *, watched: Sequence[str] = (), data_share: float = 0.0) -> list[str]:
    """Return the lines of the summary at the end of a run.

    `data_share`: the share of time spent waiting for data, 0 to 1.
    """
    values = _courses(result.history, watched)
    longest = max([8, *map(len, values)])
    courses = [line for name, one in values.items() for line in _course(f" {name:<{longest}}", one, width)]
    note, end, found = (f" {word:<{min(longest, 20)}} " for word in ("note", "end", "best"))
    notes = [line for one in result.notes for line in joined([one], width, start=note)]
    done = f"{_many(result.epochs, 'epoch')}, {_many(result.updates, 'update')}, {duration(result.seconds)}"
    skipped = f"{result.skipped} skipped" if result.skipped else ""
    blocked = f"{duration(result.blocked)} of it waiting for saves" if result.blocked >= MIN_REPORTED_WAIT else ""
    parts = [part for part in (done, blocked, skipped, result.stopped) if part]
    weights, best = f"weights: {result.weights}", result.best
    faster = [f"{note}data waited {data_share:.0%}: try workers=4"] if data_share >= MIN_REPORTED_SHARE else []
    if best is None:
        return [*courses, *notes, *joined([*parts, weights], width, start=end), *faster]
    value = f"{best.name} {number(best.value)} at epoch {best.epoch}, update {best.update}"
    ended = joined(parts, width, start=end)
    return [*courses, *notes, *ended, *joined([value, weights], width, start=found), *faster]


def at_once(finished: str, result: Result, width: int = WIDEST) -> list[str]:
    """Return the line for a run that had finished in an earlier session."""
    best = result.best
    found = [] if best is None else [f"best {best.name} {number(best.value)}"]
    return joined([f"{finished} is finished: {result.stopped}", *found, f"weights: {result.weights}"], width)


def _versions() -> str:
    try:
        own = f"trainwright {version('trainwright')}"
    except PackageNotFoundError:  # imported from a source tree that is not installed
        own = "trainwright"
    return f"{own} · torch {torch.__version__}"


def _train(plan: Plan) -> str:
    batches = "" if plan.batches is None else _many(plan.batches, "batch", "batches")
    if batches and plan.batch_size is not None:
        batches += f" of {plan.batch_size}"
    counted = " in ".join(part for part in ("" if plan.rows is None else _many(plan.rows, "row"), batches) if part)
    loader = plan.train.partition(" from a ")[2]
    by = f" from a {loader}" if loader and counted else ""
    return f"train {counted or plan.train or 'data without a length'}{by}"


def _arithmetic(plan: Plan) -> list[str]:
    (_, first), *later = plan.accumulate
    accumulate = "" if (first, later) == (1, []) else f"accumulate {first}"
    accumulate += "".join(f", {k} from epoch {epoch + 1}" for epoch, k in later)
    inside = plan.updates_in(0)
    updates = [] if inside is None or later else [f"{_many(inside, 'update')}/epoch"]
    if plan.updates is not None:
        updates.append(f"{plan.updates} in all" if updates else f"{_many(plan.updates, 'update')} in all")
    elif plan.epochs is not None:
        updates.append(_many(plan.epochs, "epoch"))
    planned = " → ".join(part for part in (accumulate, ", ".join(updates)) if part)
    limit = [] if plan.max_seconds is None else [f"at most {duration(plan.max_seconds)}"]
    return [part for part in (planned, *limit) if part]


def _courses(history: Sequence[Mapping[str, float]], watched: Sequence[str]) -> dict[str, list[float]]:
    """Return the history of at most four losses and monitored numbers. Losses of further sets are dropped first."""
    known = list(dict.fromkeys(name for row in history for name in row))
    sets = [name for name in known if is_set_loss(name, known)]
    values = {name: [row[name] for row in history if name in row] for name in known}
    drawn = [name for name in ("loss", "val_loss", *watched, *sets) if len(values.get(name, ())) > 1]
    chosen = list(dict.fromkeys(drawn))[:4]
    return {name: values[name] for name in dict.fromkeys(("loss", "val_loss", *sets, *watched)) if name in chosen}


def _course(name: str, values: Sequence[float], width: int) -> list[str]:
    first, last = number(values[0]), number(values[-1])
    room = max(4, min(24, width - len(f"{name} {first}  {last}")))
    return joined([f"{name} {first} {sparkline(values, room)} {last}"], width)


def _many(n: int, one: str, several: str = "") -> str:
    return f"{n} {one if n == 1 else several or one + 's'}"
