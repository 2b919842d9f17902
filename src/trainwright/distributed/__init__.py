"""How do ranks start, share an update, and fail? The only package that imports `torch.distributed`.

In reading order: mesh (the settings; the role of a rank: its rows, its copy or shard of the weights), world (one rank
and its collectives); environment (rank and world size of torchrun, `srun`, MPI; the store that all ranks share), start
(the process group), launch (ranks from a script or a notebook); ddp; fsdp, and pieces and
resharding (the state of sharded models); peer_watch (a rank that failed or does not answer).

Promises: all ranks call the same in the same order; a setting that is wrong on one rank is refused on all; when a rank
fails, all end within `timeout` seconds and a short grace period, and the error names the rank and its line.
"""
