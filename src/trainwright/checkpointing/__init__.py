"""Writes, retains and loads checkpoints.

A save: `RunCheckpoints.save` (`fit/saving.py`) gathers the parts. `CheckpointManager.save` encodes them
(`format.encode`). `Writer.submit` copies them to host memory. Its thread runs `SaveJob.write` (in `manager`): `commit`,
then retention.

The order of writes in `commit`, with the reason for each:

1. the files, each flushed: the rename must not overtake their bytes;
2. the manifest with their checksums: a directory with a manifest is complete;
3. the directory is flushed, then renamed to its name: the rename is atomic;
4. the parent directory is flushed: the checkpoint is durable. Only now are older checkpoints removed.

In reading order: `checkpoint` (settings), `manager` (retention, the best), `writer` (the thread), `commit` (order of
writes, lock), `format` (manifest, version), `files` (one file: fsync, checksum), `tensorfile` (safetensors), `tree`
(JSON and tensors), `weights` (the file of a model), `load` (finds the checkpoint of `resume=`), `parts` (restores
`{part: state}` strictly), `optimizer_state` (by parameter name). For several ranks: `coordinator` (rank 0 acts for all;
the manager), `sharded_files` (all ranks write one checkpoint).

Promises: a checkpoint is complete or absent, also after a power cut. Damage is detected and named. Loading runs no code
from a file. At most one save is in flight. A run whose last save failed does not end as a success.
"""
