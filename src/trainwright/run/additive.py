"""Compares the loss of a few rows with that of their parts: where they differ, no batch may be run in parts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainwright.base.errors import first_line
from trainwright.runtime.memory import is_out_of_memory
from trainwright.runtime.modules import evaluating
from trainwright.runtime.randomness import have_moved, random_state, set_random_state
from trainwright.slots.window import Window

if TYPE_CHECKING:
    from trainwright.run.run import Run

CLOSE = {torch.float64: 1e-7, torch.float32: 3e-3}
"""How far sums in another order may be apart, of the largest number in them, by the type of the weights."""
COARSE = 3e-2
"""The same in half precision."""


class Found(NamedTuple):
    """What came of a comparison; nothing where parts give the loss of the whole."""

    refused: str = ""
    """Why they do not."""
    unknown: str = ""
    """Why nobody can tell."""
    again: bool = False
    """Whether it may be told of fewer rows."""


def compared(run: Run, whole: Window, parts: Window) -> Found:
    """Run the steps of some rows at once, and of the same rows in parts; the gradients are dropped.

    What the steps have moved is left to the caller to put back.
    """
    if run.owner.hooks.computes_itself:
        return Found(unknown="`compute_gradients` is your own")
    try:
        return _compared(run, whole, parts)
    except Exception as error:  # a step may fail on a part in any way; memory may be too small even for that
        if is_out_of_memory(error):
            return Found(unknown="there is no memory for two rows at once", again=True)
        return Found(refused=f"a part of its rows cannot be run: {first_line(error)}")


def _compared(run: Run, whole: Window, parts: Window) -> Found:
    before = random_state()
    losses, draws = _losses(run, whole, parts), have_moved(before)
    if draws:  # noise differs between a whole and its parts: without it, if that is possible
        roots = [root for root in (run.owner.model, run.owner.loss) if isinstance(root, nn.Module)]
        set_random_state(before)
        with evaluating(*roots):
            losses, draws = _losses(run, whole, parts), have_moved(before)
    if draws:
        return Found(unknown="steps draw random numbers in eval mode too")
    one, several, largest = losses
    if not math.isfinite(one) or not math.isfinite(several):
        return Found(unknown="the loss of the first rows is not finite")
    if abs(one - several) <= _close(run) * max(abs(one), largest):
        return Found()
    n = ", ".join(map(str, parts.rows))
    why = "a row's loss depends on the other rows of its micro-batch"
    return Found(f"{why}: of {sum(parts.rows)} rows at once it is {one:.6g}, in parts of {n} it is {several:.6g}")


def _losses(run: Run, whole: Window, parts: Window) -> tuple[float, float, float]:
    """The loss of the whole, that of all parts together, and the largest number in its sum."""
    (one,), several = _run(run, whole), _run(run, parts)
    return one, math.fsum(several), max(map(abs, several))


def _run(run: Run, window: Window) -> list[float]:
    """The weighed losses of a window's micro-batches, which add up to its loss; no number is noted."""
    ledger, found = run.ledger, list[float]()
    ledger.window, noting, ledger.noting = window, ledger.noting, False
    window.begin()
    window.begun = True
    try:
        for index in range(len(window.batches)):
            with nullcontext() if run.autocast is None else run.autocast:
                returned = run.step(Window.__getitem__(window, index))
            found.append(float(ledger.weigh(returned).detach()))
    finally:
        ledger.noting = noting
    return [loss * float(window.owed) for loss in found]


def _close(run: Run) -> float:
    kinds = {parameter.dtype for parameter in run.gradients.parameters}
    return COARSE if run.autocast is not None else max(CLOSE.get(kind, COARSE) for kind in kinds)
