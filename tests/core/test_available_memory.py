"""What memory is left on a CUDA device, by what torch tells of it."""

from __future__ import annotations

import pytest
import torch

from trainwright.core.device import available_memory

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("share", "left"),
    [(1.0, 600 + 50), (0.5, 500 - 150 + 50), (0.1, 50)],
    ids=["all of it", "half", "less than there is already"],
)
def test_what_is_left_is_what_is_free_and_what_torch_keeps_within_the_share_of_the_process(
    share: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = {
        "mem_get_info": (600, 1000),
        "memory_reserved": 150,
        "memory_allocated": 100,
        "get_per_process_memory_fraction": share,
    }
    for name, value in reported.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert available_memory(DEVICE) == left
