"""The CUDA kernels of `custom_operator.py` give what a plain loop gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_operator.py"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    found = importlib.util.spec_from_file_location("custom_operator", EXAMPLE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    line = module.build(tmp_path_factory.mktemp("built"))
    if line.startswith("scan runs in Python"):
        pytest.skip(line)
    assert line.startswith("scan is built for CPU and CUDA" if cpp_extension.CUDA_HOME else "scan is built for CPU")
    return module


def plain(decays, entered):
    states = [entered[:, 0]]
    for step in range(1, entered.shape[1]):
        states.append(decays[:, step] * states[-1] + entered[:, step])
    return torch.stack(states, 1)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 64, 200), (1, 7, 1), (0, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cuda_kernels_are_the_plain_loop(example, device, shape, dtype):
    torch.manual_seed(0)
    leaves = [torch.rand(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2)]
    weights = torch.randn(shape, dtype=dtype, device=device)
    built, looped = (
        (output, *torch.autograd.grad(output, leaves, weights)) for output in (example.scan(*leaves), plain(*leaves))
    )
    for one, other in zip(built, looped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_torch_finds_no_fault_with_it_on_cuda(example, device):
    leaves = [torch.rand(3, 5, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(torch.ops.example.scan.default, leaves)
    assert torch.autograd.gradcheck(example.scan, leaves)
