"""Which process this is among how many, where no Trainer has said it yet."""

from __future__ import annotations

import os


def place() -> tuple[int, int]:
    """Rank and number of the processes: of an initialised group, of `torchrun`'s environment, else of `srun`'s."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        known = os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit()
        if known and (rank == "RANK" or "SLURM_STEP_ID" in os.environ):
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
