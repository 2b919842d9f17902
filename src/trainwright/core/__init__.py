"""The basis of all other packages: records, durations, errors, checks, devices and random states.

Files in reading order:
`records.py`: the return values of steps and of `fit`, and the records of observers. `figures.py`: their plots.
`durations.py`: `Updates`, `Epochs`, `Seconds`, and triggers that fire periodically.
`progress.py`: the counters of a run. `plan.py`: the planned length of a run. `monitor.py`: comparison of values.
`errors.py`: errors and the layout of their messages. `checks.py`: checks of settings and of saved state.
`suggestions.py`: "did you mean", and names of other libraries. `lazy.py`: imports public names on first use.
`device.py`: devices, batches on them, their memory. `rng.py`: random states. `signals.py`: signals that end a run.
`trees.py`: nested values, and the contents of modules. `host_reads.py`: the only reads of tensors on the host.
`torch_private.py`: all private names of torch, with the versions for which they were checked.

Promise: of this library, it imports `protocols.py` only.
"""
