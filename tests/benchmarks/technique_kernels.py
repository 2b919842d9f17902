"""What guides claim of evaluation, kernels, memory and the process, and what measures it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from technique_cases import KUHN, MIGACZ
from technique_measuring import (
    Bench,
    Claim,
    Found,
    blocks,
    by_turns,
    cnn,
    compare,
    digits,
    times_as_fast,
    train,
    verdict,
)
from torch import Tensor, nn

from trainwright.modules import checkpoint_activations
from trainwright.modules.peak_memory import LiveTensors

SCRIPT = """
import time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(UPDATES * 128, 784), torch.randint(10, (UPDATES * 128,))
begun = time.process_time()
for rows in torch.randperm(len(x)).split(128):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
print("seconds", time.process_time() - begun)
"""
"""A plain loop whose temporaries are large enough for glibc to give them back to the system each time."""


def no_grad(bench: Bench) -> Found:
    """A pass forward with and without gradients: its time, and the most memory that it holds."""
    model, x = blocks(2 if bench.tiny else 8, 64), torch.randn(256, 64)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    number = 1 if bench.tiny else 40
    ways = {
        "graph": lambda: [model(x).sum() for _ in range(number)],
        "none": lambda: [evaluate() for _ in range(number)],
    }
    ratio, spread = compare(by_turns(ways, bench), "graph", "none")
    memory = peak(model, lambda: model(x)) / peak(model, evaluate)
    said = f"x{memory:.1f} less memory, {times_as_fast(ratio, spread)} in time, 8 blocks of 64 channels, 256 rows"
    return Found(measured=said, holds="yes" if memory > 1.5 else "no", ratio=memory)


def bias_free(bench: Bench) -> Found:
    """Convolutions with and without a bias before BatchNorm: time, and the gradient of the bias beside its weight's."""
    data = digits(64, image=True)[0][: 1 if bench.tiny else 22]
    models = {"bias": cnn(bias=True), "free": cnn()}
    for model in models.values():
        model(data[0][0])
    made = {name: (model, torch.optim.SGD(model.parameters(), lr=0.01)) for name, model in models.items()}
    ways = {name: _training(model, data, one) for name, (model, one) in made.items()}
    ratio, spread = compare(by_turns(ways, bench), "bias", "free")
    first: Any = models["bias"][0]  # type: ignore[index]
    share = float(first.bias.grad.abs().max() / first.weight.grad.abs().max())
    said = f"an update {times_as_fast(ratio, spread)}; the gradient of a bias is {share:.0e} of its weight's: rounding"
    faster = verdict(spread, claimed=1.01)
    holds = "no" if share > 1e-4 else "partly" if faster == "no" else faster
    return Found(measured=said, holds=holds, ratio=ratio, spread=spread)


def compiled(bench: Bench) -> Found:
    """Updates of a model of blocks as it is, and compiled by inductor; the seconds that compiling takes beside them."""
    if shutil.which("g++") is None and not bench.tiny:
        return Found(measured="no C++ compiler is here", holds="not here")
    torch.manual_seed(0)
    model = blocks(2 if bench.tiny else 4, 128)
    data = [(torch.randn(64, 128), torch.arange(64) % 10)] * (2 if bench.tiny else 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    quick: Any = torch.compile(model, backend="aot_eager" if bench.tiny else "inductor")
    begun = time.perf_counter()
    train(quick, data[:1], optimizer)
    took = time.perf_counter() - begun
    times = by_turns({"eager": _training(model, data, optimizer), "compiled": _training(quick, data, optimizer)}, bench)
    ratio, spread = compare(times, "eager", "compiled")
    said = (
        f"an update {times_as_fast(ratio, spread)}, after {took:.0f} s of compiling; 4 blocks of 128 channels, 64 rows"
    )
    return Found(measured=said, holds=verdict(spread, claimed=1.4), ratio=ratio, spread=spread)


def checkpointing(bench: Bench) -> Found:
    """16 blocks as they are and checkpointed: the most memory of one update, and its time."""
    number = 4 if bench.tiny else 16
    plain, small = blocks(number, 128), blocks(number, 128)
    checkpoint_activations(small, blocks=type(plain[0]))  # type: ignore[index]
    data = [(torch.randn(512, 128), torch.arange(512) % 10)]

    def update(model: nn.Module) -> Callable[[], None]:
        return lambda: nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()

    memory = peak(plain, update(plain)) / peak(small, update(small))
    ratio, spread = compare(by_turns({"plain": update(plain), "small": update(small)}, bench), "plain", "small")
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), small.parameters(), strict=True))  # type: ignore[arg-type]
    assert same, "the gradients differ"
    said = (
        f"x{memory:.1f} less memory, an update {times_as_fast(ratio, spread)}; {number} blocks, gradients bitwise equal"
    )
    return Found(measured=said, holds="yes" if memory > 2 else "partly", ratio=memory)


def bf16(bench: Bench) -> Found:
    """Updates of a large and of a small perceptron in float32 and under autocast to bfloat16."""
    flags = Path("/proc/cpuinfo")
    if not bench.tiny and flags.is_file() and "bf16" not in flags.read_text():
        return Found(measured="this CPU has no instructions for bfloat16", holds="not here")
    reported, spread = [], (1.0, 1.0)
    for width in (64,) if bench.tiny else (64, 1024):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        data = [(torch.randn(128, width), torch.arange(128) % 10)] * (1 if bench.tiny else 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def low(model: nn.Module = model, data: Any = data, optimizer: Any = optimizer) -> None:
            for x, y in data:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

        ratio, spread = compare(
            by_turns({"float32": _training(model, data, optimizer), "bf16": low}, bench), "float32", "bf16"
        )
        reported.append(f"{times_as_fast(ratio, spread)} at {width} channels")
    holds = verdict(spread, claimed=1.5)
    return Found(
        measured=f"an update {', '.join(reported)}",
        holds="partly" if holds == "yes" else holds,
        ratio=ratio,
        spread=spread,
    )


def flush_denormal(bench: Bench) -> Found:
    """A product of numbers so small that they are denormal, as they are and flushed to zero."""
    if not torch.set_flush_denormal(True):
        return Found(measured="this CPU does not flush them", holds="not here")
    torch.set_flush_denormal(False)
    x = torch.full((64 if bench.tiny else 1 << 20,), 1e-39)

    def product(*, flush: bool) -> None:
        torch.set_flush_denormal(flush)
        try:
            for _ in range(1 if bench.tiny else 20):
                x * 0.5
        finally:
            torch.set_flush_denormal(False)

    ways = {"as they are": lambda: product(flush=False), "flushed": lambda: product(flush=True)}
    ratio, spread = compare(by_turns(ways, bench), "as they are", "flushed")
    said = f"a product of denormal numbers {times_as_fast(ratio, spread)}; without such numbers nothing changes"
    return Found(measured=said, holds=verdict(spread, claimed=1.5), ratio=ratio, spread=spread)


def allocator(bench: Bench) -> Found:
    """A plain loop in processes of its own, with glibc set to keep what was freed."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
    times: dict[str, list[float]] = {"plain": [], "kept": []}
    for number in range(bench.rounds):
        for name in ("plain", "kept") if number % 2 else ("kept", "plain"):
            times[name].append(_seconds(SCRIPT.replace("UPDATES", "2" if bench.tiny else "100"), kept, name == "kept"))
    ratio, spread = compare(times, "plain", "kept")
    said = f"an update {times_as_fast(ratio, spread)}, MLP 784-512-512-10, batch 128, {bench.rounds} pairs"
    return Found(measured=said, holds=verdict(spread, claimed=1.2), ratio=ratio, spread=spread)


def _seconds(code: str, environment: dict[str, str], given: bool) -> float:
    """The seconds that a script prints, run with or without variables of the environment."""
    process = {**os.environ, **(environment if given else {})}
    run = subprocess.run([sys.executable, "-c", code], env=process, capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


def peak(model: nn.Module, run: Callable[[], Any]) -> int:
    """The most bytes that a computation holds beside the model and its gradients."""
    model.zero_grad(set_to_none=True)
    held: list[Tensor] = [*model.parameters(), *model.buffers()]
    with LiveTensors(held) as living:
        returned = run()
    del returned
    model.zero_grad(set_to_none=True)
    return living.peak


def _training(model: nn.Module, data: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lambda: train(model, data, optimizer)


CLAIMS = [
    Claim("no_grad", "evaluation without gradients takes less memory and time", f"{MIGACZ}; {KUHN}", no_grad),
    Claim("bias_free", "no bias in a convolution before BatchNorm: it is of no use and costs time", MIGACZ, bias_free),
    Claim("compile", "1.4 times as fast on average, up to 2", "PyTorch 2.0 announcement (A100)", compiled),
    Claim(
        "checkpointing",
        "memory of the square root of the layers, for one more forward",
        "Chen et al., arXiv 1604.06174",
        checkpointing,
    ),
    Claim("bf16", "faster on CPUs with AVX512_BF16 or AMX", MIGACZ, bf16),
    Claim(
        "flush_denormal",
        "denormal numbers are slow, and may be flushed to zero",
        "documentation of torch",
        flush_denormal,
    ),
    Claim(
        "allocator",
        "an allocator that keeps what is freed is faster on a CPU",
        MIGACZ,
        allocator,
        "CPU, processes of their own, one thread",
    ),
]
