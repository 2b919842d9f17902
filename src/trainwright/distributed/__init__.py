"""Training on several ranks: start, collectives, DDP, FSDP and failures. The only package with `torch.distributed`.

Files in reading order:
`mesh.py`: settings, and the role of a rank: its rows, its copy or shard of the weights.
`world.py`: one rank and its collectives.
`environment.py`: rank and world size from torchrun, `srun` or MPI; the store that all ranks share.
`start.py`: the process group. `launch.py`: ranks started from a script or a notebook.
`ddp.py`, `fsdp.py`: the two kinds of parallelism. `pieces.py`, `resharding.py`: the state of sharded models.
`peer_watch.py`: detection of ranks that failed or do not answer.

Promises: all ranks call the same methods in the same order. A setting that is wrong on one rank raises an error on all.
When a rank fails, all ranks end within `timeout` seconds and a short grace period; the error names the rank and its
line.
"""
