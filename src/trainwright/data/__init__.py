"""Where batches come from, and how their order is exact.

Every form of data becomes a `Source`: `epoch(n, skip)` yields the batches of an epoch from any position, `commit` marks
those that were trained on, `position` and `seek` save and restore the place after them, `shard` selects a rank's part.

In reading order: `source` (the contract), `opening` (which source for which data, and `batches`). Rows of a data set:
`row_batches` (the order, from seed and epoch), `arrays` (tensors: one gather per batch), `seeded` (data sets: draws by
row, or all rows read once), `splitting` (a data set in two parts). Other data: `streams` (ready batches, endless
streams), `dataloader/` (the user's own loader). Several ranks: `sharding` (each rank runs its slice of a batch; streams
that shard themselves). `data_state`: the states of loaders, samplers and data sets. `transforms/`: padding, buckets,
zips.

Promises: a resume at any batch continues with the rows and the draws of a run without an interruption; what cannot be
exact is said in the header of the run. Any number of ranks runs the same rows, each once. The user's own loader yields
the batches that it yields in a plain loop, and draws as it does there.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
