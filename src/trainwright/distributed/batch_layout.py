"""How a batch is dealt to processes: which of its rows are one process's, and what that process runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Shard:
    """One process of those that a batch is dealt to.

    A batch is cut into contiguous slices that are as even as can be, in the order of the ranks, so that the slices laid
    end to end are the batch. Where there are fewer rows than `size * least`, the last ranks get none.
    """

    rank: int
    """Which process this is, from 0."""
    size: int
    """How many processes there are."""
    least: int = 1
    """Rows that a slice has at least, where the batch has as many: 2 where one row alone breaks a BatchNorm."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and self.least >= 1, self

    def served(self, rows: int) -> int:
        """How many processes, from the first, get rows of a batch of `rows`."""
        return max(1, min(self.size, rows // self.least))

    def of(self, rows: int) -> range:
        """The positions of a batch of `rows` that are this process's; an empty range where none is."""
        served = self.served(rows)
        if self.rank >= served:
            return range(rows, rows)
        return range(rows * self.rank // served, rows * (self.rank + 1) // served)

    def run(self, rows: int) -> range:
        """The positions that this process runs: its own, or the first one's, which stand in where it has none."""
        return self.of(rows) or range(rows // self.served(rows))

    def sizes(self, rows: int) -> list[int]:
        """Rows of every process, by rank."""
        return [len(Shard(rank, self.size, self.least).of(rows)) for rank in range(self.size)]

    def told(self, rows: int) -> str:
        """The sizes for the header: "64 = 2 x 32", "64 = 22 + 21 + 21", "10 = 2 x 3 + 2 x 2" for many processes."""
        sizes = sorted(self.sizes(rows), reverse=True)
        kinds = sorted(set(sizes), reverse=True)
        if len(kinds) > 1 and self.size <= 3:
            return f"{rows:,} = {' + '.join(map(str, sizes))}"
        return f"{rows:,} = {' + '.join(f'{sizes.count(kind)} x {kind:,}' for kind in kinds)}"


class Slice(NamedTuple):
    """What one process runs of a batch."""

    batch: Any
    """The rows that this process runs; where none falls to it, those of the first process, as a dummy."""
    rows: int | None
    """How many rows of `batch` count here: 0 for a dummy; None: as many as it has (a stream's own batch)."""
    whole: int | None
    """Rows over all processes; None where that is not known (a stream)."""
