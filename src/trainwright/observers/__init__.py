"""Observers: who watches a run, where its numbers go, and how it is measured.

Files in reading order:
`console.py`: header, rows and end of a run. `table.py`: numbers as text, rows that fit a width. `live.py`: the bar.
`journal.py`: every number as lines of JSON.
`loggers/`: experiment trackers.
`probes.py`: a function of the user between updates, statistics by parameter.
`throughput.py`: rows per second, utilization, memory.
`profiler.py`: torch's profiler.

Promises: an observer gets records of plain numbers and cannot change the run; it costs nothing in a step whose event it
does not override; it runs on rank 0 alone, but a `RunObserver` with a `name` is needed on all ranks; after a resume the
journal and the trackers have each update once.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
