"""Figures and HTML tables of plain numbers, without pyplot's global state. Matplotlib is imported on first use.

Functions return a matplotlib `Figure`, which notebooks display. With `path` it is also saved, in the format of the
suffix. SettingError without matplotlib, or for a suffix that it does not support.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.core.checks import local_path
from trainwright.core.errors import SettingError, is_users, warn_user

if TYPE_CHECKING:
    from trainwright.core.records import Best

_MOST_CELLS = 40
"""The most classes for which a confusion matrix shows counts."""
_MOST_PANELS = 12
"""The most columns with separate panels."""
_POSITIONS = frozenset({"epoch", "update"})
_GRAY = "0.55"


def warn_of_missing_plots() -> None:
    """Warn if running user code contains a call of `plot` and matplotlib is not installed.

    Called when `fit` begins, so that a plot at the end of a long run does not fail unexpectedly.
    """
    if find_spec("matplotlib") is not None:
        return
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename) and "plot" in code.co_names:
            where = f"{Path(code.co_filename).name}, {code.co_name}"
            warn_user(f"{where} calls plot, and matplotlib is not installed: pip install matplotlib")
            return
        frame = frame.f_back  # type: ignore[assignment]


def confusion_figure(counts: Sequence[Sequence[int]], names: Sequence[str], *, path: str | Path | None = None) -> Any:
    """Draw a confusion matrix: rows are true classes, columns predicted ones; colors show the fraction of the row."""
    size = len(counts)
    side = min(14.0, max(3.4, 1.6 + 0.46 * size + 0.05 * max(map(len, names), default=0)))
    figure = _figure(side + 0.9, side)
    axes = figure.add_subplot()
    totals = [max(1, sum(row)) for row in counts]
    shares = [[count / total for count in row] for row, total in zip(counts, totals, strict=True)]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.75, label="share of the true class")
    bar.outline.set_visible(False)
    axes.set(xlabel="predicted class", ylabel="true class")
    _name_classes(axes, names)
    if size <= _MOST_CELLS:
        _write_counts(axes, counts, shares)
    return _finished(figure, path)


def values_figure(target: Tensor, output: Tensor, *, names: Sequence[str] = (), path: str | Path | None = None) -> Any:
    """Draw outputs over targets, both (rows, columns), with the line of equality; one panel per column.

    More than 12 columns share one panel. Non-finite rows are not drawn; the title states their number.
    """
    target, output = target.detach().double().cpu(), output.detach().double().cpu()
    columns = list(zip(target.unbind(1), output.unbind(1), strict=True))
    titles = list(names) if len(columns) > 1 else [""]
    if len(columns) > _MOST_PANELS:
        columns, titles = [(target.flatten(), output.flatten())], [f"all {len(columns)} columns"]
    figure, panels = _panels(len(columns), width=4.2, height=4.0)
    for axes, (true, predicted), title in zip(panels, columns, titles, strict=True):
        _draw_values(axes, true, predicted, title=title)
    return _finished(figure, path)


def history_figure(
    rows: Sequence[Mapping[str, float]], *, best: Best | None = None, path: str | Path | None = None
) -> Any:
    """Draw a history by epoch, or by update if an epoch has several rows.

    One panel shows the losses, one each other number (training and validation together), one the learning rates. A
    non-finite value is drawn as a cross at the bottom. `best`, the `Best` of the run, is marked in all panels.
    """
    if not rows:
        raise SettingError("there is no history to draw", want="at least one validation or finished epoch")
    epochs = [row["epoch"] for row in rows]
    unit = "epoch" if len(set(epochs)) == len(epochs) else "update"
    groups = _grouped(rows)
    figure, panels = _panels(len(groups), width=4.4, height=3.3)
    for axes, (title, names) in zip(panels, groups.items(), strict=True):
        for name in names:
            points = [(row[unit], row[name]) for row in rows if name in row]
            _draw_series(axes, points, name=name)
        _mark_best(axes, rows, names, best=best, unit=unit)
        axes.set(title=title, xlabel=unit)
        _whole_ticks(axes, [row[unit] for row in rows])
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(frameon=False, fontsize=8)
    return _finished(figure, path)


def schedule_figure(
    rates: Sequence[Sequence[float]],
    *,
    title: str = "",
    updates_per_epoch: int | None = None,
    path: str | Path | None = None,
) -> Any:
    """Draw the learning rate of each group by update, from 1. `rates`: one row per update, one rate per group."""
    figure = _figure(6.4, 3.6)
    axes = figure.add_subplot()
    updates = range(1, len(rates) + 1)
    groups = [list(column) for column in zip(*rates, strict=True)]
    for index, group in enumerate(groups):
        style = "-" if group not in groups[:index] else "--"
        axes.plot(updates, group, style, drawstyle="steps-mid", label=f"group {index}")
    axes.set(xlabel="update", ylabel="learning rate")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    _plain_frame(axes)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=8)
    if updates_per_epoch is not None:
        length = updates_per_epoch
        axes.secondary_xaxis("top", functions=(lambda x: x / length, lambda x: x * length)).set_xlabel("epoch")
    return _finished(figure, path)


def lr_range_figure(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    *,
    marks: Mapping[str, float],
    path: str | Path | None = None,
) -> Any:
    """Draw losses and smoothed losses of a sweep over learning rates, with a vertical line at each rate in `marks`.

    The first mark is a solid line. The vertical range is that of the losses up to the minimum plus 50 %, so that a
    later divergence does not flatten the curve.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.add_subplot()
    _plain_frame(axes)
    axes.plot(rates, losses, ".", color=_GRAY, markersize=4, label="each update")
    axes.plot(rates, smoothed, linewidth=1.8, label="smoothed")
    for number, (name, rate) in enumerate(marks.items()):
        color, style = ("tab:red", "-") if number == 0 else (("tab:green", "tab:purple")[number % 2], ":")
        axes.axvline(rate, color=color, linestyle=style, linewidth=1.2, label=f"{name}: {rate:.3g}")
    if rates and min(rates) > 0:
        axes.set_xscale("log")
    if losses:
        low = min(losses)
        high = max(losses[: losses.index(low) + 1])
        if high > low:
            axes.set_ylim(low - 0.2 * (high - low), high + 0.5 * (high - low))
    axes.set(xlabel="learning rate", ylabel="loss")
    axes.legend(frameon=False, fontsize=8)
    return _finished(figure, path)


def _figure(width: float, height: float) -> Any:
    """Return an empty figure with an Agg canvas, so that the backend of the process is neither chosen nor changed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise SettingError(
            "plots are drawn by matplotlib, which is not installed",
            fix='pip install matplotlib   # or pip install ".[plot]" in the clone',
        ) from error

    class ShownFigure(Figure):
        """A figure that notebooks display even if pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    figure = ShownFigure(figsize=(width, height), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def _panels(number: int, *, width: float, height: float) -> tuple[Any, list[Any]]:
    columns = number if number <= 3 else math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    figure = _figure(width * columns, height * rows)
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(number)]
    for axes in panels:
        _plain_frame(axes)
    return figure, panels


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _finished(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        known = figure.canvas.get_supported_filetypes()
        path = local_path(path, "plot({})", file=True)
        ending = path.suffix.removeprefix(".").lower()
        if ending not in known:
            raise SettingError(
                f"plot({str(path)!r})", want=f"a name that ends in .{', .'.join(known)}", fix='"plot.png"'
            )
        figure.savefig(path)
    return figure


def _name_classes(axes: Any, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / _MOST_CELLS)
    shown = list(range(0, len(names), step))
    labels = [names[index] for index in shown]
    size = 9 if len(shown) <= 24 else 7
    longest = max(map(len, labels), default=0)
    slanted = longest > 3 and longest * len(shown) > 30
    axes.set_xticks(shown, labels, fontsize=size, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    if slanted:
        for label in axes.get_xticklabels():
            label.set_rotation_mode("anchor")
    axes.set_yticks(shown, labels, fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _write_counts(axes: Any, counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]) -> None:
    digits = max(len(str(count)) for row in counts for count in row)
    size = min(10.0 if len(counts) <= 24 else 7.0, 34 / digits)
    for true, row in enumerate(counts):
        for guess, count in enumerate(row):
            color = "white" if shares[true][guess] > 0.55 else "0.15" if count else "0.75"
            axes.text(guess, true, str(count), ha="center", va="center", color=color, fontsize=size)


def _draw_values(axes: Any, true: Tensor, predicted: Tensor, *, title: str) -> None:
    finite = true.isfinite() & predicted.isfinite()
    lost = len(finite) - int(finite.sum())
    true, predicted = true[finite], predicted[finite]
    many = len(true)
    axes.scatter(
        true.numpy(), predicted.numpy(), s=18 if many < 1000 else 6, alpha=0.6 if many < 300 else 0.3, linewidths=0
    )
    if many:
        low = min(float(true.min()), float(predicted.min()))
        high = max(float(true.max()), float(predicted.max()))
        axes.plot([low, high], [low, high], color=_GRAY, linestyle="--", linewidth=1, zorder=1)
        margin = 0.05 * (high - low) or 1.0
        axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
    axes.set_aspect("equal")
    note = f"{lost} not finite, not drawn" if lost else ""
    axes.set_title(" · ".join(filter(None, (title, note))))
    axes.set(xlabel="true", ylabel="predicted")


def _grouped(rows: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """Return the names of numbers in each panel, by panel title: losses first, learning rates last."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _POSITIONS))
    rates = [name for name in names if name == "lr" or name.startswith("lr_")]
    losses = [name for name in names if name not in rates and (name == "loss" or name.endswith("_loss"))]
    groups: dict[str, list[str]] = {"loss": losses} if losses else {}
    for name in names:
        if name not in rates and name not in losses:
            groups.setdefault(_without_prefix(name, names), []).append(name)
    return groups | ({"learning rate": rates} if rates else {})


def _without_prefix(name: str, names: Sequence[str]) -> str:
    """Return a name without its validation prefix: `accuracy` for `val_accuracy` and `val_easy_accuracy`."""
    if not name.startswith("val_"):
        return name
    bare = name.removeprefix("val_")
    ends = [other for other in names if bare == other or bare.endswith(f"_{other}")]
    return max(ends, key=len, default=bare)


def _draw_series(axes: Any, points: Sequence[tuple[float, float]], *, name: str) -> None:
    places, values = [place for place, _ in points], [value for _, value in points]
    marker = "o" if len(points) <= 40 else ""
    (line,) = axes.plot(places, values, marker=marker, markersize=3, linewidth=1.5, label=name)
    lost = [place for place, value in points if not math.isfinite(value)]
    if lost:
        foot = axes.get_xaxis_transform()
        axes.plot(lost, [0.02] * len(lost), "x", color=line.get_color(), transform=foot, label=f"{name}: not finite")


def _mark_best(
    axes: Any, rows: Sequence[Mapping[str, float]], names: Sequence[str], *, best: Best | None, unit: str
) -> None:
    if best is None:
        return
    place = next((row[unit] for row in rows if row["update"] == best.update), None)
    if place is None:
        return
    axes.axvline(place, color=_GRAY, linestyle=":", linewidth=1, zorder=1)
    if best.name in names:
        label = f"best: {best.value:.4g} ({unit} {place:g})"
        axes.plot(
            [place], [best.value], "o", markersize=9, markerfacecolor="none", markeredgecolor="black", label=label
        )


def _whole_ticks(axes: Any, places: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if len(set(places)) == 1:
        axes.set_xlim(places[0] - 1, places[0] + 1)


# HTML tables of records for notebooks: escaped, and without colors, for light and dark themes.

_MOST_ROWS = 12
"""The most rows of a history that are shown; the last ones."""


def html_table(rows: Iterable[Sequence[Any]], *, head: Sequence[str] = ()) -> str:
    """Return an HTML table; the first cell of each row is its heading."""
    top = f"<thead><tr>{''.join(f'<th>{_html_text(name)}</th>' for name in head)}</tr></thead>" if head else ""
    lines = "".join(
        f'<tr><th style="text-align: left">{_html_text(name)}</th>'
        + "".join(f'<td style="text-align: left">{_html_text(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return f"<table>{top}<tbody>{lines}</tbody></table>"


def html_pairs(values: Mapping[str, Any]) -> str:
    """Return an HTML table of names and values, without empty values."""
    return html_table((name, value) for name, value in values.items() if value not in (None, "", (), {}))


def html_history(history: Sequence[Mapping[str, float]]) -> str:
    """Return the last rows of a history as an HTML table."""
    names = list(dict.fromkeys(name for row in history for name in row))
    hidden = len(history) - _MOST_ROWS
    note = f"<p>{hidden} earlier rows are not shown.</p>" if hidden > 0 else ""
    return note + html_table(([row.get(name, "") for name in names] for row in history[-_MOST_ROWS:]), head=names)


def _html_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):
        return "<br>".join(map(_html_text, value))
    return escape(str(value))
