"""Advice on a GPU: the clock judges, memory is the peak of the allocator, and no trace is left."""

from __future__ import annotations

import pytest
import torch
from advise_run import advice_on


@pytest.mark.gpu
def test_advice_on_a_gpu_is_judged_by_the_clock(device: torch.device) -> None:
    advice, same = advice_on(device, seconds=20)
    assert same
    assert advice.noise["ready"].clock == "wall clock" and "tf32" in str(advice.settings)
    tried = {effect.name: effect for effect in advice.tried}
    for name in ("bf16", "channels-last", "batch size x2"):
        assert tried[name].speedup is not None, tried[name].verdict
    assert advice.memory > 64 * 64 * 16 * 16 * 4
    memory = tried["batch size x2"].memory
    assert memory is not None and 1.1 < memory < 3  # cuDNN tries kernels with memory of their own beside


@pytest.mark.slow
def test_advice_of_the_same_network_on_the_cpu() -> None:
    advice, same = advice_on(torch.device("cpu"), seconds=4, width=8)
    assert same
    assert advice.noise["ready"].clock == "CPU time"
    tried = {effect.name: effect for effect in advice.tried}
    assert all(tried[name].trials for name in ("bf16", "channels-last", "batch size x2"))
    assert tried["channels-last"].drift is not None and tried["channels-last"].drift < 1e-3
