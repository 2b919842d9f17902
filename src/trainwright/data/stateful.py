"""Data that tell their own position, by `state_dict` and `load_state_dict`: where they stood at a boundary, and now."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright.core.errors import DataError
from trainwright.data.generators import knows_its_state


class Asked:
    """The state of a loader or data set of the user's own, with the number of batches that it belongs to."""

    def __init__(self, data: Any, *, rows_by_number: bool = False) -> None:
        self.data = data
        """What is asked for its state."""
        self.rows_by_number = rows_by_number
        """Whether data keep a state but no position: rows are asked for by number."""
        self._given = 0
        self._begun = False
        self._boundary: dict[str, Any] | None = None

    def counted(self, iterator: Iterator[Any], given: int) -> Iterator[Any]:
        """The batches of a pass, after `given` that were given before."""
        self._begun, self._given, self._boundary = True, given, None
        return self._counting(iterator)

    def at_boundary(self) -> None:
        """Note that all batches given so far are trained on."""
        if self._begun:
            self._boundary = self._now()

    def state_dict(self) -> dict[str, Any] | None:
        """The state now and the one of the boundary; None before the first pass."""
        return {"now": self._now(), "boundary": self._boundary} if self._begun else None

    def load(self, tree: dict[str, Any] | None, *, given: int | None) -> None:
        """Put back the state after `given` batches of its epoch; None for the last one."""
        if tree is None:
            return
        known = [state for state in (tree["now"], tree["boundary"]) if state is not None]
        fitting = [state for state in known if given in (None, state["given"])]
        if not fitting:
            raise not_there([state["given"] for state in known], given)
        self.data.load_state_dict(deepcopy(fitting[0]["state"]))

    def settle(self, tree: dict[str, Any] | None) -> None:
        """Put back the last state at once: no epoch follows, and others read the same data."""
        if tree is not None:
            self.load(tree, given=None)
            self._begun, self._given, self._boundary = True, tree["now"]["given"], tree["boundary"]

    def _counting(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._given += 1
            yield batch

    def _now(self) -> dict[str, Any]:
        return {"given": self._given, "state": deepcopy(self.data.state_dict())}


def asked_of(data: Any) -> Asked | None:
    """What is to be asked where batches come from `data`: they themselves, or a loader's data set; None: nothing."""
    if knows_its_state(data):
        return Asked(data)
    # Workers have copies of the data set, whose states come with their batches.
    if not isinstance(data, DataLoader) or data.num_workers or not knows_its_state(data.dataset):
        return None
    return Asked(data.dataset, rows_by_number=not isinstance(data.dataset, IterableDataset))


def not_there(known: list[int], given: int | None) -> DataError:
    """The error of a resume at a batch that no state was kept for."""
    have = " and ".join(f"after {batches} batches" for batches in sorted(set(known)))
    fix = "resume from another checkpoint of the run, or fit(..., resume_data=False)"
    return DataError(f"the data cannot go on after {given} batches of the epoch", have=have, fix=fix)
