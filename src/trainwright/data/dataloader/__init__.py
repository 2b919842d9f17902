"""The `DataLoader` of a user: iterated as in a plain loop, and resumed inside an epoch.

Files in reading order:
`loader.py`: `LoaderBatches`, the source of a loader. `order.py`: the sampler's order without its first items, and a
twin of the loader that is iterated in this order. `workers.py`: worker processes, which send their random states with
the batches; notes on their errors. `tensor_dataset.py`: a loader over tensors in memory, with one `index_select` per
batch.

Promises: the same batches and draws as in a plain loop, bit for bit. A resume skips items in the sampler and reads no
row twice; data that cannot be skipped are read and dropped. The loader's class and sampler are not changed: passes run
on twins that share its attributes. Private names of torch's loader: `core/torch_private.py`.
"""
