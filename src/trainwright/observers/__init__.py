"""Observers: report the events of a run, and measure it.

In reading order: `console.py` (header, rows, end) with `table.py` (numbers as text, rows of limited width) and
`live.py` (progress bar); `journal.py` (all numbers as JSON lines); `loggers/` (experiment trackers); `probes.py`
(functions of the user, statistics per parameter); `throughput.py` (speed, memory); `profiler.py` (torch's profiler).

Promises: an observer receives records of plain numbers and cannot change the run. An event that no observer overrides
costs nothing. Observers run on rank 0 alone; a `RunObserver` with a `name` must be given on all ranks. After a resume
the journal and the trackers hold each update once.

To add:

- an observer: subclass `Observer`, override `on_...`, and pass it in `observers=[...]`;
- an observer that measures the run: subclass `RunObserver` (`probes.py`), and add its `Inspector` and a line of
  `inspectors_of` in `fit/inspection.py`;
- an event: add a method to `Observer`, its name to `protocols.EVENTS`, and a caller of `listeners`. Callers today:
  `update/reporter.py` (`on_update`), `fit/boundary.py` (`on_validate`, `on_epoch`), `fit/saving.py` (`on_save`),
  `fit/context.py` (`on_fit_start`, `on_fit_end`), `fit/inspection.py` (all others);
- a tracker: subclass `Logger` in a module of `loggers/`, like `tensorboard.py`; add its name to `__init__.pyi` and an
  extra to `pyproject.toml`.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
