"""Observers: who watches a run, where its numbers go, and how it is measured.

In reading order: `console.py` (header, rows, end) with `table.py` (numbers as text, rows that fit a width) and
`live.py` (the bar); `journal.py` (every number as lines of JSON); `loggers/` (experiment trackers); `probes.py` (a
function of the user, statistics by parameter), `throughput.py` (rates, memory), `profiler.py` (torch's profiler).

Promises: an observer gets records of plain numbers, cannot change the run, and costs nothing in a step whose event it
does not override. It runs on rank 0 alone; all ranks need a `RunObserver` that has a `name`. After a resume the journal
and the trackers hold each update once.

To write one: subclass `Observer`, override `on_...`, and give it as `observers=[...]`. One that measures the run: a
`RunObserver` (`probes.py`) with its `Inspector` in `fit/inspection.py`, and a line in `inspectors_of`. A new event: a
method of `Observer`, its name in `protocols.EVENTS`, and a caller that asks `listeners`. The callers: `on_update`
`update/reporter.py`; `on_validate`, `on_epoch` `fit/boundary.py`; `on_save` `fit/saving.py`; `on_fit_start`,
`on_fit_end` `fit/context.py`; the others `fit/inspection.py`. A tracker of experiments: a subclass of `Logger` in a
module of `loggers/` like `tensorboard.py`. Public names: `observers/__init__.pyi`, and an extra in `pyproject.toml`.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
