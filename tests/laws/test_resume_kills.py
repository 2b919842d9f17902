"""The law Resume at random kill points: once, several times in a row, in the middle of a save or of a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .resume_cells import SETTINGS
from .resume_law import check_kills, memory, workers

PLAIN = {setting: values[0] for setting, values in SETTINGS.items()}
CELLS = [
    PLAIN | {"place": "mid-epoch", "precision": "fp16", "average": "EMA", "accumulate": 3, "schedule": "StepLR"},
    PLAIN | {"place": "after validation", "model": "cnn", "data": "shuffle", "schedule": "Plateau"},
    PLAIN | {"place": "mid-epoch", "model": "cnn", "data": "generator", "precision": "bf16", "average": "EMA"},
    PLAIN | {"place": "mid-epoch", "data": "shuffle", "workers": "2 persistent", "accumulate": 3},
]
MOMENTS = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def kills():
    """`kills(index, moments)` checks a cell; its run that is never killed is made once."""
    root = Path(mkdtemp(prefix="kills-", dir=memory()))
    with workers(1) as pool:
        yield lambda index, moments: pool.submit(
            check_kills, CELLS[index], root / str(index) / "whole", moments
        ).result()
    shutil.rmtree(root)


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=10)
@given(index=st.sampled_from(range(len(CELLS))), moments=MOMENTS)
@example(index=0, moments=[0.5, 0.02, 0.05])  # the later ones in the resume itself
@example(index=1, moments=[0.153, 0.297, 0.269])
@example(index=2, moments=[0.01, 0.99])
@example(index=3, moments=[0.4, 0.6, 0.5])
def test_killed_at_any_moment_and_again_it_goes_on_as_if_it_never_was(kills, index, moments):
    assert not kills(index, moments)
