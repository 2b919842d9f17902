"""A custom operator in C++ and CUDA: a gated recurrent network reads digits pixel by pixel.

    python custom_operator.py [--build DIRECTORY]

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn, read as 64 steps; 397 of them are held out
Builds    custom_operator.cpp beside this file, with g++ (or what CXX names) and ninja, in 10 s; where there are
          nvcc and a GPU, custom_operator.cu too. In the directory that --build or TORCH_EXTENSIONS_DIR names, where the
          next run finds it, else in a temporary one. Without a compiler the operator runs in Python
Time      4 to 6 s of training on one CPU core
Expected  at least 90 % of the held-out digits right

The operator is h[t] = decay[t] * h[t-1] + input[t], which PyTorch does not have. A loop over 64 steps has 128
operations, each with its own node in the graph. The operator passes over the memory once, and once for its gradients.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils import cpp_extension

from trainwright import OneCycle, Trainer, accuracy, batches

# 1. What the operator is, for autograd, torch.compile and the meta device: its schema, shapes and gradient. Its kernel
# in Python is the one of every device that has none of its own; what is built below takes over on CPU and CUDA.

torch.library.define("example::scan", "(Tensor decays, Tensor inputs) -> Tensor")
torch.library.define("example::scan_backward", "(Tensor grad, Tensor decays, Tensor states) -> (Tensor, Tensor)")


def scan(decays: Tensor, inputs: Tensor) -> Tensor:
    """States h[t] = decays[t] * h[t-1] + inputs[t] with h[-1] = 0; all are of shape (rows, steps, channels)."""
    states: Tensor = torch.ops.example.scan(decays, inputs)
    return states


@torch.library.impl("example::scan", "default")
def _scan(decays: Tensor, inputs: Tensor) -> Tensor:
    _check(decays, inputs)
    states = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    state = torch.zeros_like(inputs[:, 0])
    for step, (decay, entered) in enumerate(zip(decays.unbind(1), inputs.unbind(1), strict=True)):
        state = states[:, step] = decay * state + entered
    return states


@torch.library.impl("example::scan_backward", "default")
def _scan_backward(grad: Tensor, decays: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients: g[t] = grad[t] + decays[t+1] * g[t+1] is that by inputs[t], and g[t] * h[t-1] that by decays[t]."""
    _check(grad, decays)
    _check(decays, states)
    by_decays, by_inputs = (torch.zeros_like(grad, memory_format=torch.contiguous_format) for _ in range(2))
    carried = torch.zeros_like(grad[:, 0])
    for step in reversed(range(grad.shape[1])):
        carried = by_inputs[:, step] = grad[:, step] + carried
        if step:
            by_decays[:, step] = carried * states[:, step - 1]
        carried = decays[:, step] * carried
    return by_decays, by_inputs


def _fake_scan(decays: Tensor, inputs: Tensor) -> Tensor:
    _check(decays, inputs)
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _fake_scan_backward(grad: Tensor, decays: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    _check(grad, decays)
    _check(decays, states)
    made = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return made, torch.empty_like(made)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    by_decays, by_inputs = torch.ops.example.scan_backward(grad, *ctx.saved_tensors)
    return by_decays, by_inputs


torch.library.register_fake("example::scan", _fake_scan)
torch.library.register_fake("example::scan_backward", _fake_scan_backward)
torch.library.register_autograd("example::scan", _differentiate, setup_context=_remember)
for device in ("cpu", "cuda"):  # a sum over many steps is one of float32 under mixed precision too
    torch.library.register_autocast("example::scan", device, torch.float32)


def _check(one: Tensor, other: Tensor) -> None:
    if one.shape != other.shape or one.dim() != 3 or one.dtype != other.dtype or one.device != other.device:
        have = " and ".join(f"{tuple(each.shape)} {each.dtype} on {each.device}" for each in (one, other))
        raise ValueError(f"scan: two tensors (rows, steps, channels) of one shape, type and device, not {have}")


# 2. Its kernels: custom_operator.cpp and custom_operator.cu beside this file.


def build(directory: Path) -> str:
    """Build the kernels in this directory and load them; a line that says for which devices, and why for no others.

    What lies there from an earlier run, of the same source, is taken as it is.
    """
    for tool in (cpp_extension.get_cxx_compiler(), "ninja"):
        if shutil.which(tool) is None:
            return f"scan runs in Python: there is no {tool!r} on the PATH to build its kernels with"
    on_gpu = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
    source = Path(__file__)
    begun = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "trainwright_example_scan",
        [str(source.with_suffix(ending)) for ending in ((".cpp", ".cu") if on_gpu else (".cpp",))],
        extra_cflags=["-O3"],
        build_directory=str(directory),
        is_python_module=False,
    )
    line = f"scan is built for {'CPU and CUDA' if on_gpu else 'CPU'}, in {time.perf_counter() - begun:.1f} s"
    no_nvcc = torch.cuda.is_available() and not on_gpu
    return f"{line}; on CUDA it runs in Python, for there is no nvcc" if no_nvcc else line


# 3. A network that is made of it, trained like any other.


class Gated(nn.Module):
    """A layer of minGRU (Feng et al., arXiv 2410.01201): gates and candidates of each step, kept by their gates."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs, channels)
        self.candidates = nn.Linear(inputs, channels)

    def forward(self, entered: Tensor) -> Tensor:
        gates = torch.sigmoid(self.gates(entered))
        return scan(1 - gates, gates * self.candidates(entered))


class Reader(nn.Module):
    """Two gated layers over the pixels of a picture, one after the other; the last state names the digit."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(64, channels))
        self.pixel = nn.Linear(1, channels)
        self.layers = nn.Sequential(Gated(channels, channels), nn.GELU(), Gated(channels, channels))
        self.digit = nn.Linear(channels, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        states: Tensor = self.layers(self.pixel(pixels[:, :, None]) + self.places)
        logits: Tensor = self.digit(states[:, -1])
        return logits


def train(*, epochs: int) -> float:
    """The share of held-out digits that are right at the end."""
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    rows, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    order = torch.randperm(len(rows))
    training, held_out = order[:1400], order[1400:]
    val = batches((rows[held_out], classes[held_out]), 256)
    trainer = Trainer(
        Reader(),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
    )
    trainer.fit(batches((rows[training], classes[training]), 50, shuffle=True, seed=0), val, epochs=epochs)
    return trainer.evaluate(val, name="held_out")["held_out_accuracy"]


def milliseconds(repeats: int = 20) -> float:
    """What one forward and backward pass of 50 rows, 64 steps and 64 channels takes: the shortest of some."""
    decays, inputs = (torch.rand(50, 64, 64, requires_grad=True) for _ in range(2))
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        scan(decays, inputs).sum().backward()
        taken.append(time.perf_counter() - begun)
    return 1000 * min(taken)


def built(directory: Path | None) -> str:
    """Build them in this directory, in that of TORCH_EXTENSIONS_DIR, or in one that is deleted once they are loaded."""
    if directory is None and "TORCH_EXTENSIONS_DIR" in os.environ:
        directory = Path(os.environ["TORCH_EXTENSIONS_DIR"], "trainwright_example_scan")
    if directory is not None:
        return build(directory)
    with tempfile.TemporaryDirectory() as scratch:
        return build(Path(scratch))


def main() -> None:
    reading = argparse.ArgumentParser(description="A gated recurrent network with an operator of its own, on digits.")
    reading.add_argument("--build", type=Path, metavar="DIRECTORY", help="where what is built stays")
    asked = reading.parse_args()
    before = milliseconds()
    print(built(asked.build))
    print(f"64 steps of 50 rows, forward and backward: {before:.2f} ms in Python, {milliseconds():.2f} ms now")
    print(f"{train(epochs=16):.1%} of the held-out digits are right")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.set_flush_denormal(True)  # gradients fade over 64 steps; x86 is ten times slower at numbers below 1e-38
    main()
