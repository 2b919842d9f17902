"""How is the learning rate of an update found? As a function of the applied updates, by torch's own schedulers.

Files in reading order:
`bound`: `BoundSchedule`, a schedule with an optimizer and a plan; parameter groups, and values that others wrote there.
`table`: rates as one table for each parameter group, grown on demand by torch's scheduler.
`settings`: the common base class: checks, `bind`, `plot`. `lengths`: durations and fractions of the run in updates.
`standard`: the `schedule=` of a Trainer: steps and curves, functions, and cycles with the momentum. `stepped`:
Plateau and `TorchSchedule`, which have a history.

Promises: each rate has the bits of torch's scheduler of that name; the clock of applied updates alone decides, so that
a resume looks up the next rate; a schedule ends exactly with the run, and a value of a group that is set by hand is
refused. A new schedule: a frozen dataclass with `@suggests` on `BuiltinSchedule` and `spec(plan)` (a `TableSpec`), in
`standard`; a line in `__init__.pyi`, from which the package takes its names (`core/lazy.py`), and one in
`standard._EXAMPLES`; the names that others give its arguments in `core/suggestions.py`.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
