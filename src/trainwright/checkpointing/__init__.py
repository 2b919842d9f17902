"""Checkpoints: how one is written, which ones are kept, and how one is loaded.

A save: `RunCheckpoints.save` (`fit/saving.py`) gathers the parts, `CheckpointManager.save` makes the files
(`format.encode`), `Writer.submit` copies them to host memory, and its thread runs `SaveJob.write` (in `manager`):
`commit`, then retention. The order of writes, with the reason for each: files, each flushed (a rename must not
overtake their bytes); the manifest with their checksums (a directory with one is complete); the directory flushed;
renamed to its name (atomic); its parent flushed (durable). Then, and only then, older checkpoints are removed. A resume
reads all of it back and restores the parts strictly.

In reading order: `checkpoint` (settings), `manager` (and retention: the best, and which to remove), `writer`, `commit`
(the order of writes, the lock), `format` (manifest, version), `files` (one file: fsync, checksum), `tensorfile`
(safetensors), `tree` (JSON and tensors), `weights` (a model's file), `load` (which checkpoint `resume=` means),
`parts` (`{part: state}`), `optimizer_state` (by parameter name). Several ranks: `coordinator` (rank 0
acts for all, all read one; the manager), `sharded_files` (all write one checkpoint).

Promises: a checkpoint is complete or absent, also after a power cut; damage is detected and named; loading runs no
code from a file; at most one save is in flight; a run whose last save failed does not end as if it had succeeded.
"""
