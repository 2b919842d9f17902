"""Formats numbers as text: a table of limited width, one row at a time; times, rates and sparklines."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainwright.core.records import Validation

WIDE_FIRST = ("data", "rows/s", "time")
"""Columns dropped first from a row that is too wide, in this order and without a notice."""

_ALWAYS_SHOWN = ("epoch", "loss", "val_loss", "best")

_WIDTHS = {"epoch": 5, "update": 6, "best": 5, "time": 6, "rows/s": 6, "data": 4, "skipped": 7}
_LEVELS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "\u00d7"
_PLAIN = str.maketrans(f"{_LEVELS}●·→{_NOT_FINITE}", "_.-:=+*#*|>x")


class ConsoleTable:
    """Rows of validations and epochs under one header, no wider than `width`.

    A column is added with its first number, and the header is then printed again. If a row is too wide, columns are
    dropped in this order: `WIDE_FIRST`; training metrics that validation has too; learning rates; other numbers, the
    last first, losses of validation sets after the rest; `skipped` and `update`; the `watched` ones. A line names the
    dropped columns, except `WIDE_FIRST`.
    """

    def __init__(self, width: int, *, watched: Sequence[str] = ()) -> None:
        self._width = width
        self._watched = watched
        self._known: list[str] = []
        self._shown: list[str] = []
        self._hidden: list[str] = []

    def lines(self, record: Validation) -> list[str]:
        """Return the row of a record; before it the header if that has changed."""
        cells = _cells(record)
        header = self._header(cells) if any(name not in self._known for name in cells) else []
        return [*header, self._line({name: cells.get(name, "") for name in self._shown})]

    def _header(self, cells: Mapping[str, str]) -> list[str]:
        before = self._shown, self._hidden
        self._known = sorted({*self._known, *cells}, key=_place([*self._known, *cells]).__getitem__)
        self._shown, self._hidden = list(self._known), []
        worth = _worth(self._known, self._watched)
        for name in sorted(reversed(self._known), key=worth.__getitem__):
            if name not in _ALWAYS_SHOWN and len(self._line(dict.fromkeys(self._shown, ""))) > self._width:
                self._shown.remove(name)
                self._hidden += [] if name in WIDE_FIRST else [name]
        if (self._shown, self._hidden) == before:
            return []
        missing = joined(reversed(self._hidden), self._width, start=" not shown  ") if self._hidden else []
        return [*missing, self._line({name: name for name in self._shown})]

    def _line(self, cells: Mapping[str, str]) -> str:
        gap = 2  # beside one space between columns: a long number uses the gap, and no other column shifts
        columns = ((text, _WIDTHS.get(name, max(len(name), 8)) + gap) for name, text in cells.items())
        return "".join(f" {text:>{width}}" for text, width in columns)[gap:]


def number(value: float) -> str:
    """Format with four decimals; very large or small numbers with four digits and an exponent: 0.1324, 1.324e-5."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.4f}"
    if not 1e-3 <= abs(value) < 1e6:
        return _exponent(f"{value:.3e}")
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"


def rate(value: float) -> str:
    """Format a learning rate: 2.15e-3."""
    return _exponent(f"{value:.2e}") if math.isfinite(value) and value else f"{value:g}"


def amount(value: float) -> str:
    """Format a large number briefly: 980, 19.8k, 5.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.99995:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def byte_size(count: float) -> str:
    """Format bytes: 512 B, 3.2 KiB, 1.5 GiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.95 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Format a duration: 35ms, 0.4s, 59.1s, 4m05s, 2h30m."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Return one line per row, with aligned columns. The first `left` columns are left-justified, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if index < left else '>'}{width}}}" for index, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in rows]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return a sparkline of at most `width` characters. Each is the mean of equally many values; × if not finite.

    The line is flat if all values are equal, or within a millionth and with ends that print equally.
    """
    size = max(1, math.ceil(len(values) / width))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return _NOT_FINITE * len(means)
    low, span = min(finite), max(finite) - min(finite)
    flat = not span or (number(values[0]) == number(values[-1]) and span <= 1e-6 * max(map(abs, finite)))
    steps = len(_LEVELS) - 1
    levels = (steps / 2 if flat else (mean - low) / span * steps for mean in means)
    return "".join(
        _LEVELS[round(level)] if math.isfinite(mean) else _NOT_FINITE for level, mean in zip(levels, means, strict=True)
    )


def is_set_loss(name: str, names: Collection[str]) -> bool:
    """Return whether a name is the loss of one of several validation sets, `val_<name>_loss`."""
    return "val_loss" not in names and name.startswith("val_") and name.endswith("_loss")


def joined(parts: Iterable[str], width: int, *, start: str = "") -> list[str]:
    """Join parts with ` · ` into lines of at most `width` characters; later lines are indented to the first part."""
    lines, line = [], start
    for part in (piece for one in parts for piece in _pieces(one, width - len(start))):
        separator = " · " if line.strip() and line != start else ""
        if separator and len(line) + len(separator) + len(part) > width:
            lines.append(line)
            line, separator = " " * len(start), ""
        line += separator + part
    return [*lines, line]


def printable(text: str, encoding: str | None) -> str:
    """Return the text; characters that the encoding lacks are replaced by ASCII."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding or "ascii", "replace").decode(encoding or "ascii")
    return text


def _cells(record: Validation) -> dict[str, str]:
    cells = {"epoch": str(record.epoch), "update": str(record.update)}
    for name, value in record.metrics.items():
        if name not in cells:
            cells[name] = rate(value) if _is_rate(name) else number(value)
    if record.best:
        cells["best"] = "●"
    elif record.patience:
        cells["best"] = f"{record.waited}/{record.patience}"
    if record.seconds > 0:
        cells["time"] = duration(record.seconds)
        # A run that resumes at the end of an epoch has trained on no row in this session.
        cells["rows/s"] = amount(record.rows / record.seconds) if record.rows else "-"
        cells["data"] = f"{record.waiting:.0%}"
    if record.skipped:
        cells["skipped"] = str(record.skipped)
    return cells


def _place(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the order of columns: lr, loss, val_loss, other metrics by first appearance, then those of the run."""
    first = ("epoch", "update", "lr", "loss", "val_loss")
    last = ("best", "time", "rows/s", "data", "skipped")
    return {
        name: (0, first.index(name)) if name in first else (2, last.index(name)) if name in last else (1, place)
        for place, name in reversed(list(enumerate(names)))
    }


def _worth(names: Sequence[str], watched: Sequence[str]) -> dict[str, int]:
    """Return the rank of each column for rows that are too wide: the lowest is dropped first."""
    validated = [name for name in names if name.startswith("val_")]
    worth = {}
    for name in names:
        if name in WIDE_FIRST:
            worth[name] = WIDE_FIRST.index(name) - len(WIDE_FIRST)
        elif name in watched:
            worth[name] = 5
        elif name in ("skipped", "update"):
            worth[name] = 4
        elif is_set_loss(name, names):
            worth[name] = 3
        elif not name.startswith("val_") and any(one.endswith(f"_{name}") for one in validated):
            worth[name] = 0
        else:
            worth[name] = 1 if _is_rate(name) else 2
    return worth


def _is_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr_")


def _exponent(text: str) -> str:
    """Shorten an exponent: 1.50e-03 becomes 1.50e-3."""
    digits, exponent = text.split("e")
    return f"{digits}e{int(exponent)}"


def _pieces(text: str, width: int) -> list[str]:
    """Cut a part that is wider than a line, between words if possible."""
    pieces = []
    while len(text) > width:
        cut = text.rfind(" ", 1, width + 1)
        cut = cut if cut > 0 else width
        pieces.append(text[:cut])
        text = text[cut:].lstrip()
    return [*pieces, text]
