"""What guides claim of the data, the schedule and the update, and what measures it."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
from technique_measuring import (
    Batches,
    Bench,
    Claim,
    Found,
    accuracy,
    by_turns,
    cnn,
    compare,
    digits,
    mlp,
    times_as_fast,
    train,
    verdict,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwright import batches
from trainwright.core.device import usable_cores

KUHN = "Kuhn, Faster Deep Learning Training with PyTorch (2021)"
MIGACZ = "Migacz, PyTorch Performance Tuning Guide"
TARGET = 0.96
"""Held-out accuracy that a schedule is to reach."""


class Pictures(Dataset[Any]):
    """Random pictures of 28 x 28, each cropped, flipped and normalized by itself, as in the MNIST examples."""

    def __init__(self, rows: int) -> None:
        draws = np.random.default_rng(0)
        self.images = draws.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        self.labels = draws.integers(0, 10, rows)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index]).float().div_(255).unsqueeze(0)
        image = nn.functional.pad(image, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 28, left : left + 28]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image - 0.13) / 0.31, int(self.labels[index])


def workers(bench: Bench) -> Found:
    """One epoch by one process, by two workers, and from memory; by the wall clock, workers having been started."""
    data = Pictures(64 if bench.tiny else 4096)
    model = cnn(8)
    model(torch.zeros(2, 1, 28, 28))
    optimizer, pinned = torch.optim.SGD(model.parameters(), lr=0.01), torch.cuda.is_available()
    one = DataLoader(data, 64, shuffle=True)
    columns = torch.from_numpy(data.images).float().div_(255).unsqueeze(1), torch.from_numpy(data.labels)
    memory = batches(columns, 64, shuffle=True, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against more workers than cores: that is judged below
        several = DataLoader(data, 64, shuffle=True, num_workers=2, pin_memory=pinned, persistent_workers=True)
        ways = {
            "none": lambda: train(model, one, optimizer),  # type: ignore[arg-type]
            "workers": lambda: train(model, several, optimizer),  # type: ignore[arg-type]
            "memory": lambda: train(model, memory, optimizer),  # type: ignore[arg-type]
        }
        times = by_turns(ways, bench, clock=time.perf_counter)
    ratio, spread = compare(times, "none", "workers")
    memories = times_as_fast(*compare(times, "none", "memory"))
    said = f"an epoch {times_as_fast(ratio, spread)} with 2 workers; {memories} from memory, without the random changes"
    holds = "not here" if usable_cores() < 2 else verdict(spread, claimed=2.0)
    said += "; one core, on which workers can win nothing" if holds == "not here" else ""
    return Found(measured=said, holds=holds, ratio=ratio, spread=spread)


def batch_size(bench: Bench) -> Found:
    """An epoch in batches of 64 and of 512, and what is learnt in as many epochs."""
    epochs = 2 if bench.tiny else 20
    small, held_out = digits(64)
    large, _ = digits(512)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ways = {"64": lambda: train(model, small, optimizer), "512": lambda: train(model, large, optimizer)}
    ratio, spread = compare(by_turns(ways, bench), "64", "512")
    learnt = [_learnt(data, lr, epochs, held_out) for data, lr in ((small, 0.02), (large, 0.02), (large, 0.16))]
    said = (
        f"an epoch {times_as_fast(ratio, spread)}; held out after {epochs} epochs: {learnt[0]:.1%} in batches of 64, "
        f"{learnt[1]:.1%} of 512 at the same rate, {learnt[2]:.1%} of 512 at 8 times the rate"
    )
    return Found(measured=said, holds=verdict(spread, claimed=2.0), ratio=ratio, spread=spread)


def one_cycle(bench: Bench) -> Found:
    """The shortest run that ends at 96 % of held-out digits: the best constant rate against the best cycle."""
    seeds = range(1 if bench.tiny else 3)
    rates = (0.1,) if bench.tiny else (0.02, 0.05, 0.1, 0.2, 0.4)
    lengths = (10, 20) if bench.tiny else (20, 30, 40, 60, 80, 120, 160, 240, 320, 480)
    peaks = {"constant": rates, "cycle": (*rates, 2 * rates[-1])}
    fewest = {
        kind: [min(_updates_to_target(rate, seed, lengths, cycles=kind == "cycle") for rate in each) for seed in seeds]
        for kind, each in peaks.items()
    }
    constant, cycle = fewest["constant"], fewest["cycle"]
    ratio = statistics.median(constant) / statistics.median(cycle)
    said = (
        f"{statistics.median(cycle):.0f} updates with OneCycle, {statistics.median(constant):.0f} at a constant rate, "
        f"the best rate for each, median of {len(seeds)} seeds"
    )
    holds = "yes" if ratio >= 5 else "partly" if ratio > 1.1 else "no"
    return Found(measured=f"x{ratio:.1f}: {said}", holds=holds, ratio=ratio)


def set_to_none(bench: Bench) -> Found:
    """Gradients set to None against zeros written into them, in a model of many small layers."""
    model, data = _many_layers(bench)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    ways = {
        "zeros": lambda: train(model, data, optimizer, set_to_none=False),
        "none": lambda: train(model, data, optimizer),
    }
    ratio, spread = compare(by_turns(ways, bench), "zeros", "none")
    said = f"an update {times_as_fast(ratio, spread)}, 40 linear layers of 64"
    return Found(measured=said, holds=verdict(spread, claimed=1.02), ratio=ratio, spread=spread)


def fused(bench: Bench) -> Found:
    """AdamW by a loop over parameters, by lists of them, and by one kernel: whole updates."""
    model, data = _many_layers(bench)
    kinds: dict[str, dict[str, bool]] = {
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    made = {name: torch.optim.AdamW(model.parameters(), lr=1e-4, **kind) for name, kind in kinds.items()}
    times = by_turns({name: _training(model, data, one) for name, one in made.items()}, bench)
    ratio, spread = compare(times, "loop", "fused")
    foreach = times_as_fast(*compare(times, "loop", "foreach"))
    said = f"an update {times_as_fast(ratio, spread)} fused, {foreach} foreach, 40 linear layers of 64"
    return Found(measured=said, holds=verdict(spread, claimed=1.2), ratio=ratio, spread=spread)


def as_tensor(bench: Bench) -> Found:
    """An array of 224 x 224 x 3 taken as a tensor, and copied into one."""
    array = np.zeros((224, 224, 3), dtype=np.float32)
    number = 2 if bench.tiny else 300
    ways = {
        "copy": lambda: [torch.tensor(array) for _ in range(number)],
        "share": lambda: [torch.as_tensor(array) for _ in range(number)],
    }
    times = by_turns(ways, bench)
    ratio, spread = compare(times, "copy", "share")
    copy, share = (statistics.median(times[name]) / number * 1e6 for name in ("copy", "share"))
    said = f"{copy:.0f} us for 600 kB by tensor, {share:.1f} us by as_tensor"
    return Found(measured=said, holds=verdict(spread, claimed=2.0), ratio=ratio, spread=spread)


def _learnt(data: Batches, lr: float, epochs: int, held_out: tuple[Tensor, Tensor]) -> float:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        train(model, data, optimizer)
    return accuracy(model, held_out)


def _updates_to_target(lr: float, seed: int, lengths: tuple[int, ...], *, cycles: bool) -> int:
    """The shortest of some lengths at whose end the target is reached; four times the longest where none is."""
    data, held_out = digits(64)
    for length in lengths:
        model = mlp(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=length) if cycles else None
        for update in range(length):
            train(model, [data[update % len(data)]], optimizer)
            if schedule is not None:
                schedule.step()
        if accuracy(model, held_out) >= TARGET:
            return length
    return 4 * lengths[-1]


def _many_layers(bench: Bench) -> tuple[nn.Module, Batches]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4 if bench.tiny else 40)], nn.Linear(64, 10))
    return model, digits(64)[0][: 2 if bench.tiny else 22]


def _training(model: nn.Module, data: Batches, optimizer: torch.optim.Optimizer) -> Any:
    return lambda: train(model, data, optimizer)


CLAIMS = [
    Claim(
        "workers",
        "workers and pinned memory: an epoch in about half the time",
        f"{KUHN}, after {MIGACZ}",
        workers,
        "CPU, one thread beside two worker processes",
    ),
    Claim("batch_size", "the largest batch that fits trains faster; the rate grows with it", KUHN, batch_size),
    Claim(
        "one_cycle", "up to 10 times fewer updates (super-convergence)", "Smith and Topin, arXiv 1708.07120", one_cycle
    ),
    Claim("set_to_none", "a little faster than writing zeros", MIGACZ, set_to_none),
    Claim("fused", "fused is faster than foreach, and that than a loop", "documentation of torch.optim", fused),
    Claim("as_tensor", "as_tensor or from_numpy in place of tensor: no copy", KUHN, as_tensor),
]
