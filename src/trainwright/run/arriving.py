"""How the batches of one pass arrive where they are computed: moved, and then changed as their source says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.base.contracts import Source
from trainwright.run.owner import Owner


def mover(owner: Owner, source: Source, *, trains: bool) -> Callable[[Any], Any] | None:
    """What is called with each batch of the pass over `source` that begins next; None where nothing is to be done.

    `trains`: whether random changes of images are made.
    """
    move = owner.hooks.move
    finishing: Any = getattr(source, "finishing", None)
    if finishing is None:
        return move
    finished: Callable[[Any], Any] = finishing(move, trains=trains)
    return finished
