"""`custom_operator.py`: its kernels, built and in Python, give what a plain loop gives, under every tool of torch's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from loading import EXAMPLES

NAMES = ("example::scan", "example::scan_backward")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(scope="module")
def in_python(example):
    """What the kernels in Python give, taken before any is built: the dispatcher keeps those that are."""
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in NAMES)
    return results(example), example.train(epochs=1)


@pytest.fixture(scope="module")
def built(example, in_python, tmp_path_factory):
    """The line that the build says; where there is no compiler, the same tests run in Python."""
    directory = tmp_path_factory.mktemp("built")
    line = example.build(directory)
    if shutil.which("g++") and shutil.which("ninja") and "CXX" not in os.environ:
        assert line.startswith("scan is built for CPU")
        assert list(directory.glob("*.so"))
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in NAMES)
    return line


def inputs(shape=(3, 5, 4), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for _ in range(2)]


def plain(decays, entered):
    """The sum of the recurrence, by autograd."""
    states = [entered[:, 0]]
    for step in range(1, entered.shape[1]):
        states.append(decays[:, step] * states[-1] + entered[:, step])
    return torch.stack(states, 1)


def gradients(function, dtype=torch.float64):
    leaves = inputs(dtype=dtype)
    output = function(*leaves)
    weights = torch.randn(output.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return output, *torch.autograd.grad((output * weights).sum(), leaves)


def results(example):
    return {dtype: gradients(example.scan, dtype) for dtype in (torch.float32, torch.float64)}


def test_the_kernels_in_python_are_the_plain_loop_bit_for_bit(in_python):
    for dtype, found in in_python[0].items():
        for one, other in zip(found, gradients(plain, dtype), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_the_built_kernels_are_the_plain_loop(example, built):
    for dtype, found in results(example).items():
        for one, other in zip(found, gradients(plain, dtype), strict=True):
            torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_training_ends_the_same_with_both(example, in_python, built):
    assert example.train(epochs=1) == in_python[1] > 0.1


@pytest.mark.slow
def test_gradients_pass_gradcheck(example, built):
    assert torch.autograd.gradcheck(example.scan, inputs())


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 1, 3), (1, 7, 1), (0, 4, 2)])
def test_torch_finds_no_fault_with_the_registration(example, built, shape):
    leaves = inputs(shape)
    torch.library.opcheck(torch.ops.example.scan.default, leaves, test_utils=CHECKS)
    plain_tensors = [leaf.detach() for leaf in (*leaves, leaves[0])]
    torch.library.opcheck(torch.ops.example.scan_backward.default, plain_tensors, test_utils=CHECKS)


def test_tensors_that_do_not_lie_in_order_are_read_right(example, built):
    decays, entered = (leaf.detach().transpose(1, 2) for leaf in inputs())
    torch.testing.assert_close(example.scan(decays, entered), plain(decays, entered))


def test_the_meta_device_knows_the_shape(example):
    made = example.scan(torch.empty(2, 64, 8, device="meta"), torch.empty(2, 64, 8, device="meta"))
    assert made.shape == (2, 64, 8)
    assert made.is_meta


def test_a_compiled_network_holds_it_in_one_graph(example, built):
    network = example.Reader(channels=8)
    pixels = torch.rand(4, 64)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for found, expected in zip(both(compiled, network, pixels), both(network, network, pixels), strict=True):
        torch.testing.assert_close(found, expected)


def both(run, network, pixels):
    output = run(pixels)
    return output, *torch.autograd.grad(output.logsumexp(1).sum(), list(network.parameters()))


def test_under_mixed_precision_it_sums_in_float32(example, built):
    with torch.autocast("cpu", torch.bfloat16):
        low = [leaf.detach().bfloat16() for leaf in inputs(dtype=torch.float32)]
        assert example.scan(*low).dtype is torch.float32


@pytest.mark.parametrize(
    "other", [torch.zeros(3, 5, 3), torch.zeros(3, 5, 4, dtype=torch.float64), torch.zeros(3, 20)], ids=str
)
def test_tensors_that_do_not_match_are_refused(example, built, other):
    with pytest.raises(ValueError, match=r"two tensors \(rows, steps, channels\) of one shape, type and device"):
        example.scan(other, torch.zeros(3, 5, 4))


@pytest.mark.slow
def test_without_a_compiler_it_says_so_and_runs_in_python(tmp_path):
    """In a process of its own, whose PATH is an empty directory."""
    run = "import custom_operator as example; print(example.built(None)); print(example.train(epochs=1) > 0)"
    environment = {**os.environ, "PATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("scan runs in Python: there is no ")
    assert last == "True"


def test_a_directory_that_is_named_keeps_what_was_built(example, built, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "named"))
    asked = []
    monkeypatch.setattr(example, "build", lambda directory: asked.append(directory) or "")
    example.built(None)
    example.built(tmp_path)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    example.built(None)
    assert asked[:2] == [tmp_path / "named" / "trainwright_example_scan", tmp_path]
    assert not asked[2].exists()
