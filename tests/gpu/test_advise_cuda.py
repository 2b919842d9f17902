"""Advice on a GPU: what only CUDA has is tried, memory is what the allocator had, and no trace is left."""

from __future__ import annotations

import pytest
import torch
from advise_run import ONLY_CUDA, advice_on


@pytest.mark.gpu
def test_advice_on_a_gpu_tries_what_only_it_has(device: torch.device) -> None:
    advice, same = advice_on(device, seconds=20)
    assert same
    tried = {effect.name: effect for effect in advice.tried}
    for name in (*ONLY_CUDA, "bf16", "channels-last"):
        assert tried[name].speedup is not None, tried[name].verdict
    assert advice.memory > 64 * 64 * 16 * 16 * 4
    memory = tried["batch size x2"].memory
    assert memory is not None and 1.1 < memory < 3  # cuDNN tries kernels with memory of their own beside


@pytest.mark.slow
def test_advice_of_the_same_network_on_the_cpu() -> None:
    advice, same = advice_on(torch.device("cpu"), seconds=2, width=8)
    assert same
    assert {effect.name for effect in advice.tried if effect.why_not == "it needs a CUDA device"} >= set(ONLY_CUDA)
