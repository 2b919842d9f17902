"""Learning-rate schedules: the rate of an update as a function of the applied updates, by torch's own schedulers.

Files in reading order:
`bound.py`: `BoundSchedule`, a schedule bound to an optimizer and a plan; writes to parameter groups.
`table.py`: one table of rates per parameter group, grown on demand by torch's scheduler.
`settings.py`: the base class of settings, with checks, `bind` and `plot`. `lengths.py`: durations and fractions of the
run in updates.
`standard.py`: the schedules for `schedule=`: steps, curves, functions, and cycles with momentum. `stepped.py`:
`Plateau` and `TorchSchedule`, which depend on a history.

Promises: each rate is bitwise that of torch's scheduler of the same name. Rates depend on the applied updates only, so
a resume looks up the next rate. A schedule ends exactly with the run. A value of a parameter group that is set by hand
under a schedule raises an error.

To add a schedule: write a frozen dataclass with `@suggests`, derived from `BuiltinSchedule`, with `spec(plan)` (a
`TableSpec`), in `standard.py`; add lines in `__init__.pyi` (see `core/lazy.py`) and `standard._EXAMPLES`; add the names
of its arguments in other libraries to `core/suggestions.py`.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
