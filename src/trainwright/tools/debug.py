"""Modes for debugging: torch's anomaly mode, and deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS is deterministic."""


@contextmanager
@suggests
def anomaly(*, check_nan: bool = True) -> Iterator[None]:
    """Have torch name the line of the forward where a backward raises or computes a NaN.

    `with anomaly(): trainer.fit(...)`. This is torch's anomaly mode, restored at the end. It stores a traceback of
    every operation. A NaN raises at once, also where `on_nonfinite="skip"` or an fp16 loss scale would have skipped the
    update. In compiled code it names only the call: `Fast(compile=None)` shows the line.

    Args:
        check_nan: Whether each gradient is read: on CUDA a synchronization for each.
    """
    with torch.autograd.set_detect_anomaly(True, check_nan):
        yield


@contextmanager
@suggests
def deterministic(*, warn_only: bool = False, fill: bool = True) -> Iterator[None]:
    """Use deterministic kernels: the same bits at each run on the same machine and with the same versions.

    `with deterministic(): trainer.fit(...)`. It sets, and restores at the end, the deterministic algorithms of torch
    and of cuDNN, `cudnn.benchmark=False`, and `CUBLAS_WORKSPACE_CONFIG`, which is read once, at the first matrix
    product on CUDA. Seeds are yours to set.

    Args:
        warn_only: Operations without a deterministic kernel warn. False: they raise.
        fill: New memory is filled with NaN, which reveals reads of uninitialized memory.

    Raises:
        SettingError: Where CUDA has multiplied matrices already with a workspace that is not fixed.
    """
    with ExitStack() as undo:
        undo.enter_context(_workspace())
        undo.enter_context(_repeating(warn_only=warn_only, fill=fill))
        if torch.cuda.is_initialized() and not warn_only:
            _check_products()
        yield


@contextmanager
def _workspace() -> Iterator[None]:
    """Set a fixed workspace for cuBLAS where the environment has none: it is read at the first product."""
    before = os.environ.get(WORKSPACE)
    if before not in _FIXED:
        os.environ[WORKSPACE] = _FIXED[0]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = before


@contextmanager
def _repeating(*, warn_only: bool, fill: bool) -> Iterator[None]:
    """Set the deterministic algorithms of torch and of cuDNN."""
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    exact, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, fill
        yield
    finally:
        torch.use_deterministic_algorithms(exact, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before


def _check_products() -> None:
    """Refuse where cuBLAS runs already with another workspace: torch has read the environment, and raises."""
    one = torch.ones(1, 1, device="cuda")
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        if WORKSPACE not in str(error):
            raise
        what = f"deterministic(), and CUDA has multiplied matrices without {WORKSPACE}"
        fix = f'os.environ["{WORKSPACE}"] = "{_FIXED[0]}" at the top of the script'
        raise SettingError(what, want="a workspace that is set before the first product", fix=fix) from None
