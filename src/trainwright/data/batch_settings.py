"""The settings of `batches(...)`: how many rows a batch has, and in which order they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.core.checks import check_flag, check_whole
from trainwright.core.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How the rows of a data set are dealt into batches."""

    batch_size: int | None
    per_rank: int | None = None
    processes: int = 1
    """How many processes there are, where `per_rank` counts the rows of each of them."""
    shuffle: bool = False
    seed: int | None = None
    drop_last: bool = False
    workers: int | Literal["auto"] = "auto"
    varies: bool = False
    """Whether batches may have fewer rows than `size`."""

    def __post_init__(self) -> None:
        self._check_sizes()
        for name, value in (("seed", self.seed), ("workers", self.workers)):
            if (name == "seed" and value is None) or (name == "workers" and value == "auto"):
                continue
            check_whole(value, f"batches({name}={value!r})", least=0 if name == "workers" else None)
        for name, flag in (("shuffle", self.shuffle), ("drop_last", self.drop_last)):
            check_flag(flag, f"batches({name}={flag!r})")

    def _check_sizes(self) -> None:
        if self.per_rank is None:
            check_whole(self.batch_size, f"batches(batch_size={self.batch_size!r})", fix="batches(data, 64)")
            return
        check_whole(self.per_rank, f"batches(per_rank={self.per_rank!r})", fix="batches(data, per_rank=64)")
        if self.batch_size is not None:
            raise SettingError(
                f"batches(batch_size={self.batch_size!r}, per_rank={self.per_rank})",
                want="one of the two: rows over all processes, or rows of each",
                fix="batches(data, 64), which gives the same batches on any number of processes",
            )

    @property
    def size(self) -> int:
        """Rows of a full batch, over all processes."""
        if self.per_rank is not None:
            return self.per_rank * self.processes
        assert self.batch_size is not None
        return self.batch_size

    @property
    def told(self) -> str:
        """Rows of a batch, for the header."""
        return f"at most {self.size}" if self.varies else str(self.size)

    def length(self, rows: int) -> int:
        """Batches of `rows` rows."""
        return rows // self.size if self.drop_last else -(-rows // self.size)
