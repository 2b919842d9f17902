"""A verdict is never kinder than what has happened."""

from __future__ import annotations

import pytest

from .children import Ended, Line
from .judging import Reference, judge

STATES = {update: (f"w{update}", f"o{update}") for update in range(9)}
REFERENCE = Reference(STATES, ("w8", "o8", "rest"), 1.0, 0.1, 0.01, Ended([], 0, struck=False))


def reported(first: int, *words: str, ended: tuple[str, ...] = ("w8", "o8", "rest"), code: int = 0) -> Ended:
    """A run that goes on from update `first`, in the state of these words or the right one."""
    later = [Line("update", update, STATES[update], 0.0) for update in range(first + 1, 9)]
    lines = [Line("resumed", first, words or STATES[first], 0.0), *later, Line("ended", 8, ended, 0.0)]
    return Ended(lines, code, struck=False)


@pytest.mark.parametrize(
    ("ran", "word"),
    [
        (reported(4), "ok"),
        (reported(6), "ok"),
        (reported(2), "lost"),
        (reported(0), "scratch"),
        (reported(4, "w4", "o3"), "mixed"),
        (reported(4, "w5", "o5"), "mixed"),
        (reported(4, ended=("w8", "o8", "another history")), "drift"),
        (reported(4, code=1), "error"),
        (Ended([], 1, struck=False), "error"),
        (Ended([], 0, struck=False), "error"),
        (Ended([], -9, struck=True, hung=True), "error"),
    ],
)
def test_what_goes_on_is_held_against_what_was_acknowledged(ran: Ended, word: str) -> None:
    verdict = judge(REFERENCE, ran, acked=4, made=7)
    assert verdict is not None and verdict.word == word


def test_a_run_killed_before_it_showed_its_state_is_not_judged() -> None:
    assert judge(REFERENCE, Ended([], -9, struck=True), acked=4) is None


def test_the_updates_that_were_made_again_are_counted() -> None:
    verdict = judge(REFERENCE, reported(4), acked=4, made=7)
    assert verdict is not None and verdict.behind == 3
