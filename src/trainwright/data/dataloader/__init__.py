"""A user's own `DataLoader`: iterated as a plain loop iterates it, and resumed inside an epoch.

In reading order: `loader` (`LoaderBatches`, the source of a loader: where a pass begins, what is saved), `order` (the
sampler's order without its first items, and a twin of the loader that is iterated in it), `workers` (worker processes
send their random states with the batches; errors of workers are explained), `tensor_dataset` (a loader over tensors in
memory: one `index_select` per batch).

Promises: the same batches and the same draws as those of the plain loop, bit for bit. A resume skips in the sampler and
reads no row twice; data that cannot be skipped are read and dropped. Neither the loader's class nor its sampler is
changed: passes run on twins that share its attributes. Private names of torch's loader: `core/torch_private.py`.
"""
