"""The law Resume: interrupted at any update and resumed in a new process is never interrupted, in pairs of settings."""

from __future__ import annotations

import pytest

from .resume_cells import SETTINGS, all_cells, name, pairs, pairwise
from .resume_law import check, workers

CELLS = {name(cell): cell for cell in pairwise(all_cells())}
IN_NEW_INTERPRETERS = list(CELLS)[:3]


@pytest.fixture(scope="module")
def checked():
    """Every cell, checked by two processes at once."""
    with workers(2) as pool:
        interpreted = {name: pool.submit(check, CELLS[name], interpreter=True) for name in IN_NEW_INTERPRETERS}
        yield {name: pool.submit(check, cell) for name, cell in CELLS.items()}, interpreted
        pool.shutdown(cancel_futures=True)


@pytest.mark.sample(8)
@pytest.mark.parametrize("cell", CELLS)
def test_an_interrupted_and_resumed_run_is_the_run_that_never_was(cell, checked):
    (found,) = checked[0][cell].result()
    assert not found.differences, f"{found.at}: {found.differences}"


@pytest.mark.parametrize("cell", IN_NEW_INTERPRETERS)
def test_a_new_interpreter_goes_on_as_a_new_process_does(cell, checked):
    (found,) = checked[1][cell].result()
    assert not found.differences, f"{found.at}: {found.differences}"


def test_every_pair_of_settings_occurs_in_the_cells():
    assert set().union(*map(pairs, CELLS.values())) == set().union(*map(pairs, all_cells()))
    assert all({cell[setting] for cell in CELLS.values()} == set(SETTINGS[setting]) for setting in SETTINGS)
    assert len(CELLS) < 50
