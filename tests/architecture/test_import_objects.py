"""`import trainwright` makes so few objects that Python's full garbage collection does not fall due within it.

Importing torch leaves 165,000 objects that the collector looks through, and its counters short of the next full
collection: with torch 2.13 and Python 3.11 one falls due after some 12,000 more objects, and costs 0.07 CPU-seconds,
twice what the import itself does. So what a run may do without is imported when it is first asked for (`core/lazy.py`,
functions of `trainer.py`), and the objects of what is left are counted here, without a clock.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MOST = 7_900
"""Objects that the collector tracks, of the package and of what it alone imports; 7,853 with 58 modules."""
COUNTED = """
import gc, json, torch
gc.collect()
gc.disable()
before = len(gc.get_objects())
import trainwright
print(json.dumps(len(gc.get_objects()) - before))
"""
COLLECTED = """
import gc, json, torch
counts, limits, before = gc.get_count(), gc.get_threshold(), gc.get_stats()[2]["collections"]
import trainwright
print(json.dumps([counts, limits, gc.get_stats()[2]["collections"] - before]))
"""


def reported(script: str) -> object:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def room(counts: list[int], limits: list[int]) -> int:
    """Objects until a full collection: each count must pass its limit, counted in collections of the one before."""
    rounds = (limits[1] + 1 - counts[1]) + 1 + (limits[2] - counts[2]) * (limits[1] + 2) + 1
    return rounds * limits[0] - counts[0]


@pytest.mark.slow
def test_importing_makes_few_objects_that_the_collector_tracks() -> None:
    made = reported(COUNTED)
    assert isinstance(made, int)
    assert 1_000 < made <= MOST


@pytest.mark.slow
def test_no_full_collection_falls_due_while_importing() -> None:
    counts, limits, collections = reported(COLLECTED)  # type: ignore[misc]
    if room(counts, limits) < MOST:
        pytest.skip(f"torch leaves room for {room(counts, limits)} objects alone: a collection falls due in any case")
    assert collections == 0
