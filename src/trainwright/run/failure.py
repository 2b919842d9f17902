"""Hands an exception that comes out of a step to those who know its causes; they are imported when there is one."""

from __future__ import annotations

from typing import Any


def explain(error: BaseException, owner: Any) -> None:
    """Add one note to an exception of a training, validation or predict step; type, message and traceback stay.

    Errors of this library, interrupts, and errors that carry a note already are left alone.
    """
    if isinstance(error, Exception):
        from trainwright.run import notes

        notes.add(error, owner)
