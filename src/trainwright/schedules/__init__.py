"""How is the learning rate of an update found? As a function of the applied updates, by torch's own schedulers.

Files in reading order:
`rates`: `Rates`, a schedule bound to an optimizer and a plan, which writes the rates before each update.
`table`: rates as one table for each parameter group, grown on demand by torch's scheduler; groups and who sets them.
`settings`: what the schedules share: checks, `bind`, `plot`. `lengths`: durations and fractions of the run in updates.
`standard`: steps and curves that go down. `cycles`: OneCycle and Cyclic, with the momentum. `stepped`: Plateau and
`TorchSchedule`, which have a history. `given`: the `schedule=` of a Trainer, and functions `(update, total) -> factor`.

Promises: each rate has the bits of torch's scheduler of that name; the clock of applied updates alone decides, so that
a resume looks up the next rate; a schedule ends exactly with the run, and a value of a group that is set by hand is
refused. A new schedule: a frozen dataclass on `BuiltinSchedule` with `spec(plan)`, in `standard` or `cycles`.
"""
