"""Profiles a few updates with torch's profiler: a trace file for Chrome or Perfetto, and a table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainwright.core.checks import check_whole, local_path
from trainwright.core.errors import SettingError
from trainwright.core.records import Result
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import profiler_enabled
from trainwright.observers.live import write_line
from trainwright.observers.probes import RunObserver


@suggests
class Profile(RunObserver):
    """Profiles `updates` updates of each `fit` with torch's profiler, after the first `after` updates.

    Writes a trace such as `updates-11-15.json.gz` to `directory`; chrome://tracing and ui.perfetto.dev open it. The
    update before the first recorded one is the warm-up. Work between the recorded updates, such as a validation, is
    recorded too. Other updates cost nothing, and no result of the run changes. With several ranks, rank 0 is profiled,
    and all ranks need the same `Profile`.

    Args:
        directory: The directory of the trace.
        after: Number of updates before the first recorded one.
        updates: Number of recorded updates.
        rows: Number of operations, by self time, in the printed table. 0 prints no table.
        memory: Record memory, at a cost in time.
        shapes: Record shapes, at a cost in time.
        stacks: Record Python lines, at a cost in time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        after: int = 10,
        updates: int = 5,
        rows: int = 15,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        for name, value, least in (("after", after, 1), ("updates", updates, 1), ("rows", rows, 0)):
            check_whole(value, f"Profile({name}={value!r})", least=least)
        self.directory = local_path(directory, "Profile({})")
        self.after, self.updates, self.rows = after, updates, rows
        self.name = f"Profile(after={after}, updates={updates})"
        self.path: Path | None = None
        """The last written trace."""
        self._records: dict[str, Any] = {"profile_memory": memory, "record_shapes": shapes, "with_stack": stacks}
        self._profiler: Any = None
        self._coming = self._begun = self._before = 0
        """The first update to record; the first recorded update (0: none); the updates before this stage."""
        self._on_cuda = False

    def expect(self, update: int, *, before: int) -> None:
        """Set the first update to record (0: none), and the number of updates before this stage.

        SettingError if another profiler is active: torch supports one at a time.
        """
        self._profiler, self._coming, self._begun, self._before = None, update, 0, before
        if update and profiler_enabled():
            raise SettingError("Profile(...) in a run that is profiled already", fix="leave one of them out")

    def warm_up(self, device: torch.device) -> None:
        """Start torch's profiler in its warm-up."""
        from torch.profiler import ProfilerActivity, profile, schedule

        self.directory.mkdir(parents=True, exist_ok=True)
        self._on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        steps = schedule(wait=0, warmup=1, active=1, repeat=1)  # one profiler step spans all recorded updates
        self._profiler = profile(activities=activities, schedule=steps, acc_events=True, **self._records)
        self._profiler.start()

    def begin(self) -> None:
        """Begin recording."""
        self._profiler.step()
        self._begun = self._coming

    def end(self, update: int) -> None:
        """End the profile with this update: write the trace, print the table."""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        first, self._coming = self._begun, 0
        self.path = self.directory / f"updates-{first}-{update}.json.gz"
        profiler.export_chrome_trace(str(self.path))
        if self.rows:
            by = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=by, row_limit=self.rows)
            write_line(f"profile of updates {first} to {update}; {self.path}\n{table}")

    def on_fit_end(self, result: Result) -> None:
        """Write the trace if the run ends while recording; print a line if nothing was recorded."""
        update = self._before + result.updates
        if self._profiler is not None and self._begun and update >= self._begun:
            self.end(update)
        elif self._coming:
            write_line(f"profile: nothing recorded, for the run ended at update {update}, before {self._coming}")
        if self._profiler is not None:
            self._profiler.stop()
        self._profiler, self._coming = None, 0
