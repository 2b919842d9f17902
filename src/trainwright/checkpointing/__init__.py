"""Checkpoints: how one is written, which ones stay, and how one is loaded.

One class per role in a save: the manager decides and reports, the writer copies and runs in a thread, the commit makes
a directory that is complete or absent. What is written to disk in which order, and why, stands at the head of `commit`.

In reading order: `checkpoint` (the settings of the slot), `manager` (`CheckpointManager`: one run's checkpoints),
`retention` (the best, and which are removed), `writer` (copies, thread), `commit` (the order of writes, the lock),
`format` (names, manifest, version; state to files and back), `files` (one file: fsync, checksum), `tensorfile`
(safetensors), `tree` (JSON and tensors), `weights` (a model's file), `load` (which checkpoint `resume=` means),
`parts` (the state of a run as one tree), `optimizer_state` (by parameter name). On several ranks:
`distributed_manager`, `coordinator` (rank 0 acts for all, all read one), `sharded_files` (all write one checkpoint).

Promises: a checkpoint is complete or absent, also after a power cut; damage is noticed and named; nothing that is
loaded can run code; nothing is removed before the new one is on the disk; at most one save is in flight; a run whose
last save failed does not end as if it had succeeded.
"""
