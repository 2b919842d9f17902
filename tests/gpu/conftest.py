"""What must be set before CUDA starts, and what each test on a GPU leaves as it found it."""

import os

import pytest
import torch

# cuBLAS gives the same bits each time only where its workspace is fixed, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The profiler must not be taken down and started anew beside recorded graphs.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


@pytest.fixture
def deterministic():
    """Kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """The first GPU."""
    return torch.device("cuda", 0)
