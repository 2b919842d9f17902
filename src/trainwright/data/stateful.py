"""Loaders and data sets with `state_dict` and `load_state_dict`: their states at the last update, and now."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright.core.errors import DataError
from trainwright.data.generators import is_stateful


class OwnState:
    """The state of a loader or data set of the user's own, with the number of batches that it belongs to."""

    def __init__(self, data: Any, *, rows_by_number: bool = False) -> None:
        self.data = data
        """The object with the state."""
        self.rows_by_number = rows_by_number
        """Whether the state holds no position: rows are fetched by number."""
        self._given = 0
        self._begun = False
        self._boundary: dict[str, Any] | None = None

    def counted(self, iterator: Iterator[Any], given: int) -> Iterator[Any]:
        """Count the batches of a pass, after `given` that were given before."""
        self._begun, self._given, self._boundary = True, given, None
        return self._counting(iterator)

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on."""
        if self._begun:
            self._boundary = self._now()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the present state and the one of the last update; None before the first pass."""
        return {"now": self._now(), "boundary": self._boundary} if self._begun else None

    def load(self, tree: dict[str, Any] | None, *, given: int | None) -> None:
        """Restore the state after `given` batches of its epoch; None: the last one."""
        if tree is None:
            return
        known = [state for state in (tree["now"], tree["boundary"]) if state is not None]
        fitting = [state for state in known if given in (None, state["given"])]
        if not fitting:
            raise not_there([state["given"] for state in known], given)
        self.data.load_state_dict(deepcopy(fitting[0]["state"]))

    def seek_loaded(self, tree: dict[str, Any] | None) -> None:
        """Restore the last state at once: no epoch follows, and others read the same data."""
        if tree is not None:
            self.load(tree, given=None)
            self._begun, self._given, self._boundary = True, tree["now"]["given"], tree["boundary"]

    def _counting(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._given += 1
            yield batch

    def _now(self) -> dict[str, Any]:
        return {"given": self._given, "state": deepcopy(self.data.state_dict())}


def own_state_of(data: Any) -> OwnState | None:
    """Return the state of `data`, or of a loader's data set; None where neither has one."""
    if is_stateful(data):
        return OwnState(data)
    # Workers have copies of the data set, whose states come with their batches.
    if not isinstance(data, DataLoader) or data.num_workers or not is_stateful(data.dataset):
        return None
    return OwnState(data.dataset, rows_by_number=not isinstance(data.dataset, IterableDataset))


def not_there(known: list[int], given: int | None) -> DataError:
    """Return the error of a resume at a batch without a saved state."""
    have = " and ".join(f"after {batches} batches" for batches in sorted(set(known)))
    fix = "resume from another checkpoint of the run, or fit(..., resume_data=False)"
    return DataError(f"the data cannot go on after {given} batches of the epoch", have=have, fix=fix)
