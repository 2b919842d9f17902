"""The processes of a run: one here, and the seam where more will stand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from trainwright.base.errors import SettingError, message, not_built


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of a run's group of processes; every answer of one process is the whole answer."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def sum(self, value: Any) -> Any:
        """`value` added up over all processes."""
        assert self.size == 1
        return value


def as_world(parallel: str | None) -> World:
    """Read the `parallel` setting: None is one process, "auto" is what the environment says."""
    if parallel not in (None, "auto"):
        if isinstance(parallel, str):
            raise SettingError(
                message(f"parallel={parallel!r}: many processes are not built yet", want='"auto" or None')
            )
        raise not_built(f"parallel={parallel!r}", 'parallel="auto"')
    if parallel == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            message(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: training over several processes is not built yet",
                fix="start the script with `python`, or give parallel=None for independent runs",
            )
        )
    return World()
