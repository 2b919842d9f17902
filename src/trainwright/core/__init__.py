"""Records, durations, errors, checks, devices and random states: what all other packages use.

Files in reading order:
`records.py`: what a step returns, what observers get, what `fit` returns; `figures.py` shows it.
`durations.py`: `Updates`, `Epochs`, `Seconds`, and triggers that fire each time one has passed.
`progress.py`: the counters of a run. `plan.py`: what a run will do. `monitor.py`: which value of a number is better.
`errors.py`: errors and the layout of their messages. `checks.py`: checks of settings and of saved state.
`suggestions.py`: "did you mean", and names of other libraries. `lazy.py`: imports public names on first use.
`device.py`: devices, batches on them, their memory. `rng.py`: random states. `signals.py`: signals that end a run.
`trees.py`: nested values, and what a module contains. `host_reads.py`: the one place that reads numbers from tensors.
`torch_private.py`: every private name of torch, with the versions that it was checked on.

Promise: it imports none of the other packages but `protocols.py`, which any of them may use.
"""
