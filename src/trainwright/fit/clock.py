"""The clock of a `fit`, and which of its ends is reached."""

from __future__ import annotations

import time

from trainwright.core.progress import Counters
from trainwright.fit.plan import Ends


class RunClock:
    """Counts the seconds of a stage, over all of its sessions, and compares the counters with the ends of the `fit`.

    Several ranks agree on the seconds of rank 0 at each exchange of requests, and read these until the next one: so all
    of them reach `max_seconds` at the same update.
    """

    def __init__(self, counters: Counters, ends: Ends) -> None:
        self._counters, self._ends = counters, ends
        self._agreed: float | None = None
        """The seconds of rank 0 at the last exchange; None for one process."""

    def start(self) -> None:
        """Start, after loading: the seconds of earlier sessions count."""
        self._began = time.perf_counter() - self._counters.seconds

    def update(self) -> None:
        """Bring the counted seconds up to now; of several ranks, to the last exchange."""
        self._counters.seconds = time.perf_counter() - self._began if self._agreed is None else self._agreed

    def update_alone(self) -> None:
        """Bring the counted seconds up to now by the clock of this rank, before an exchange."""
        self._agreed = None
        self.update()

    def agree(self, seconds: float) -> None:
        """Take over the seconds of rank 0."""
        self._began -= seconds - self._counters.seconds
        self._agreed = seconds

    def end_reached(self) -> str:
        """Return which end of the `fit` is reached, or an empty string."""
        limit = self._ends.max_seconds
        if limit is not None and self._counters.seconds >= limit:
            return self.planned_end() or f"max_seconds={limit:g} reached"
        return self.planned_end()

    def planned_end(self) -> str:
        """Return which end of the `fit` is reached that is known beforehand, or an empty string."""
        counters, ends = self._counters, self._ends
        if ends.max_updates is not None and counters.updates >= ends.max_updates:
            return f"max_updates={ends.max_updates} reached"
        if ends.epochs is not None and counters.epoch >= ends.epochs:
            past = f": {counters.epoch} are done already" if counters.epoch > ends.epochs else ""
            return f"epochs={ends.epochs} reached{past}"
        return ""
