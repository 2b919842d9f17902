"""The keeper of checkpoints that the tests of the checkpoint slot start."""

from __future__ import annotations

import pytest

from trainwright.slots.checkpoint import Checkpoint


@pytest.fixture
def start(tmp_path):
    """A function that makes a prepared keeper; all are released at the end."""
    keepers = []

    def make(name="run", run_id="one", *, resuming=False, **settings):
        keeper = Checkpoint(tmp_path / name, **settings).bind(run_id)
        keepers.append(keeper)
        keeper.prepare(resuming=resuming)
        return keeper

    yield make
    for keeper in keepers:
        keeper.release()
