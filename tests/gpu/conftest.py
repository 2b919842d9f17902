"""What must be set before CUDA starts, what each test on a GPU leaves as it found it, and whose warnings fail one."""

import os

import pytest
import torch

# cuBLAS gives the same bits each time only where its workspace is fixed, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Torch's compiler, Triton and their like warn on a GPU of what the library can do nothing about, in code that no run
# without a GPU comes to. What the library's own modules are warned of stays an error: the last that fits counts.
OF_OTHERS = (
    *("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::FutureWarning"),
    *(f"error::{kind}Warning:trainwright" for kind in ("Deprecation", "PendingDeprecation", "Future")),
    # of the compiler, wherever float32 is left float32; of torch 2.9 and the next, at each question for its switches
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication:UserWarning:torch",
    "ignore:Please use the new API settings to control TF32:UserWarning:torch",
)


def pytest_collection_modifyitems(items):
    """Have no test on a GPU fail for a warning of others."""
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.filterwarnings(*OF_OTHERS))


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
