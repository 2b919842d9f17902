"""The switches of the process are put back, whichever of torch's ways they were set by, and without a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from trainwright.tools.trainer_snapshot import switches_restored

NEW = hasattr(torch.backends.cudnn, "conv") and hasattr(torch.backends.cudnn.conv, "fp32_precision")


def test_the_older_switches_are_put_back_and_nothing_is_said_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.get_float32_matmul_precision

    def warns() -> str:
        warnings.warn("Please use the new API settings to control TF32 behavior, such as ...", stacklevel=2)
        return real()

    monkeypatch.setattr(torch, "get_float32_matmul_precision", warns)
    before = real(), torch.backends.cudnn.allow_tf32
    with switches_restored():
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = not before[1]
    assert (real(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.skipif(not NEW, reason="torch before 2.9")
def test_operations_of_cudnn_that_were_set_one_by_one_stay_so() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        cudnn.conv.fp32_precision = "ieee"
        with switches_restored():
            cudnn.rnn.fp32_precision = "ieee"
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", before[1])
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
