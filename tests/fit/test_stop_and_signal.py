"""A run that was asked to stop, and was ended by a signal before it could."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest
from small import BATCHES, small

from trainwright import Checkpoint, Stopped, Trainer


@pytest.mark.parametrize("n", [5, 8])  # inside an epoch, and at its end
def test_a_run_that_was_asked_to_stop_stops_where_a_signal_came_before_it_could(n, tmp_path):
    class Stops(Trainer):
        cut = False

        def after_update(self):
            if self.progress.updates == n:
                self.stop("enough")
                if self.cut:
                    signal.raise_signal(signal.SIGTERM)

    def run(directory, *, cut=False):
        trainer = small(Stops, checkpoint=Checkpoint(directory))
        trainer.cut = cut
        with suppress(Stopped):
            trainer.fit(BATCHES * 2, epochs=2, resume="auto")
        return trainer.result.updates, trainer.result.stopped, trainer.result.history

    whole = run(tmp_path / "whole")
    assert whole[:2] == (n, "enough")
    assert run(tmp_path / "cut", cut=True)[:2] == (n, "SIGTERM")
    assert run(tmp_path / "cut") == whole
