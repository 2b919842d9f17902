"""CSV: the numbers of a run as a table that a spreadsheet or pandas opens, while it runs and after a resume."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any, TextIO

from trainwright.core.checks import local_path
from trainwright.core.durations import Duration, Updates
from trainwright.core.plan import Plan
from trainwright.core.records import Result
from trainwright.core.suggestions import suggests
from trainwright.observers.loggers.base import Logger


@suggests
class CSVLogger(Logger):
    """Writes the numbers of a run to a CSV file: a row for each update, validation or epoch, a column for each number.

    Lines are flushed as they are written; a number with a new name adds a column, and the file is written again. A
    file shows one run: a resumed one drops the rows after the update that it resumes from, and a new one renames a file
    that exists to `<name>.bak`. Settings are not in it: a `Journal` has everything, as lines of JSON.

    Args:
        path: The file.
        every: The interval, in updates or seconds, at which an update is logged; others are not recorded.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: Duration = Updates(10)) -> None:  # noqa: B008
        super().__init__(every=every)
        self.path = local_path(path, "CSVLogger({})", file=True)
        self._columns: list[str] = []
        self._file: TextIO | None = None
        self._writer: Any = None

    def open(self, plan: Plan, settings: Mapping[str, Any], *, keep: int | None) -> None:
        """Open the file after its rows up to `keep`; a new run begins a new file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if keep == -1 and self.path.exists():
            os.replace(self.path, f"{self.path}.bak")
        rows = self._rows() if self.path.exists() else []
        self._rewrite(["update"], [row for row in rows if keep is None or int(row["update"]) <= keep])

    def write(self, update: int, numbers: Mapping[str, float]) -> None:
        """Write a row."""
        if new := [name for name in numbers if name not in self._columns]:
            self._rewrite([*self._columns, *new], self._rows())
        self._writer.writerow({"update": update, **numbers})

    def close(self, result: Result | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        """Return the complete rows; a crash may have cut off the last one."""
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(line for line in file if line.endswith("\n")))

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Write the file again with these rows, and further columns where they have them; open it at its end."""
        self.close(None)
        self._columns = list(dict.fromkeys([*columns, *(name for row in rows[:1] for name in row)]))
        beside = self.path.with_name(f"{self.path.name}.tmp")
        self._file = beside.open("w", buffering=1, encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(rows)
        os.replace(beside, self.path)
