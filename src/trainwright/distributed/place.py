"""Which process this is among how many, where no Trainer has said it yet."""

from __future__ import annotations

import torch

from trainwright.distributed.environment import read_environment


def place() -> tuple[int, int]:
    """Rank and number of the processes: of the initialised group, else of the environment.

    Raises SettingError where its variables contradict each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = read_environment()
    return (0, 1) if told is None else (told.rank, told.size)
