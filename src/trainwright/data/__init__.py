"""Data: sources of batches, in an order that a resume reproduces exactly.

Every form of data becomes a `Source`: `epoch(n, skip)` yields the batches of an epoch from any position, `commit` marks
the yielded batches as trained, `position` and `seek` save and restore the position after them, and `shard` selects a
rank's part.

Files in reading order:
`source.py`: the base class. `opening.py`: the choice of a source for each form of data, and `batches`.
Rows of a data set: `row_batches.py` (the order, from seed and epoch), `arrays.py` (tensors: one gather per batch),
`seeded.py` (data sets: random draws by row, or all rows read once), `splitting.py` (a data set in two parts).
Other data: `streams.py` (ready batches, endless streams), `dataloader/` (a `DataLoader` of the user).
Several ranks: `sharding.py` (slices of batches, and streams that shard themselves).
`data_state.py`: the states of loaders, samplers and data sets. `transforms/`: padding, buckets, zips.

Promises: a resume at any batch continues with the rows and random draws of an uninterrupted run; the header of the run
states what cannot be exact. On any number of ranks, each row is run once. The user's loader yields the same batches,
and makes the same draws, as in a plain loop.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
