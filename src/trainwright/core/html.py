"""Small HTML tables, by which notebooks show records: escaped, without colours of their own, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_MOST = 12
"""Rows of a history that are shown: the last ones."""


def html_table(rows: Iterable[Sequence[Any]], *, head: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its name."""
    top = f"<thead><tr>{''.join(f'<th>{_text(name)}</th>' for name in head)}</tr></thead>" if head else ""
    lines = "".join(
        f'<tr><th style="text-align: left">{_text(name)}</th>'
        + "".join(f'<td style="text-align: left">{_text(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return f"<table>{top}<tbody>{lines}</tbody></table>"


def html_pairs(values: Mapping[str, Any]) -> str:
    """Return a table of names and values, without values that are empty."""
    return html_table((name, value) for name, value in values.items() if value not in (None, "", (), {}))


def html_history(history: Sequence[Mapping[str, float]]) -> str:
    """Return the last rows of a history as a table; empty without one."""
    names = list(dict.fromkeys(name for row in history for name in row))
    hidden = len(history) - _MOST
    note = f"<p>{hidden} earlier rows are not shown.</p>" if hidden > 0 else ""
    return note + html_table(([row.get(name, "") for name in names] for row in history[-_MOST:]), head=names)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list):
        return "<br>".join(map(_text, value))
    return escape(str(value))
