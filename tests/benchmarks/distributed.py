"""What several processes cost: Trainer against a hand-written loop under torch's DDP, on gloo.

    python tests/benchmarks/distributed.py [--rounds 15] [--epochs 1] [--passes 4] [--processes 2]

Each process runs both contestants in turn; wall time and CPU time of the first process from the end of the first epoch
to that of the last; ratios are taken within a round, medians over the rounds. All end with the same weights (checked).
The hand-written loop is what a good engineer writes: fused optimizer, in-memory batches dealt by rank, DDP with its
gradients in the buckets, losses kept as tensors. It takes the mean of the processes' means, which is right here because
all slices are equally long.

Collectives are counted by torch's profiler over the updates of one more epoch; what falls due about once a second or at
the end of an epoch is told apart.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright import DDP, Observer, Trainer, Validation, batches, launch

BATCH = 32


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "MLP, 9 k weights": (mlp, False),
    "MLP, 1.1 M weights": (wide, False),
    "CNN, 10 k weights": (cnn, True),
}


def digits(*, image: bool, passes: int) -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    rows = len(y) // BATCH * BATCH
    inputs = torch.tensor(x / 16, dtype=torch.float32)[:rows].repeat(passes, 1)
    return inputs.view(-1, 8, 8) if image else inputs, torch.tensor(y)[:rows].repeat(passes)


Ends = list[tuple[float, float]]
"""Wall time and CPU time at the end of each epoch, on the first process."""


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Watches(Observer):
    """Notes when epochs end."""

    def __init__(self) -> None:
        self.ends: Ends = []

    def on_epoch(self, record: Validation) -> None:
        self.ends.append(now())


def by_hand(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int) -> Ends:
    """A loop under DDP as one writes it who knows how."""
    inputs, targets = data
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    own, ends = BATCH // size, Ends()
    for _ in range(epochs):
        losses = []
        for start in range(rank * own, len(targets), BATCH):
            x, y = inputs[start : start + own].clone(), targets[start : start + own].clone()
            optimizer.zero_grad()
            loss = loss_function(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        ends.append(now())
    return ends


def by_trainer(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int) -> Ends:
    """The same in trainwright."""
    watches = Watches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel = DDP(find_unused_parameters=False)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, parallel=parallel, observers=[watches])
    trainer.fit(batches(data, BATCH), epochs=epochs)
    return watches.ends


CONTESTANTS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor], int], Ends]] = {
    "by hand": by_hand,
    "trainwright": by_trainer,
}


def measure(rounds: int, epochs: int, passes: int) -> dict[str, Any]:
    """On each process: time both in turn, and count what the collectives of an epoch are."""
    torch.set_num_threads(1)
    Trainer(nn.Linear(1, 1))  # makes the process group
    answers: dict[str, Any] = {}
    for name, (make, image) in MODELS.items():
        data = digits(image=image, passes=passes)
        times: dict[str, list[tuple[float, float]]] = {contestant: [] for contestant in CONTESTANTS}
        ends: dict[str, Tensor] = {}
        for number in range(rounds + 1):  # the first warms up
            order = list(CONTESTANTS) if number % 2 else list(reversed(CONTESTANTS))
            for contestant in order:
                model = make()
                dist.barrier()
                noted = CONTESTANTS[contestant](model, data, epochs + 1)
                if number and noted:
                    times[contestant].append((noted[-1][0] - noted[0][0], noted[-1][1] - noted[0][1]))
                ends[contestant] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(ends["trainwright"], ends["by hand"], rtol=1e-3, atol=1e-4)
        short = digits(image=image, passes=1)
        counted = {contestant: collectives(run, make(), short) for contestant, run in CONTESTANTS.items()}
        answers[name] = {"times": times, "collectives": counted, "updates": len(data[1]) // BATCH}
    return answers


def collectives(run: Callable[..., None], model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, int]:
    """How many collectives three epochs have more than one: what updates and epoch ends cost, not the start."""
    counts = []
    for epochs in (1, 3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(model, data, epochs)
        counts.append(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))
    return {name: counts[1][name] - counts[0][name] for name in sorted(counts[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--passes", type=int, default=4, help="how often an epoch goes over the 1,792 rows")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    answers = launch(measure, options.rounds, options.epochs, options.passes, processes=options.processes)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.processes} processes on gloo, one")
    print(f"thread each; {options.rounds} rounds of {options.epochs} epochs of {56 * options.passes} updates\n")
    for name, answer in answers.items():
        hand, ours = answer["times"]["by hand"], answer["times"]["trainwright"]
        updates = answer["updates"] * options.epochs
        for what, index in (("wall time", 0), ("CPU time", 1)):
            ratios = [our[index] / theirs[index] for our, theirs in zip(ours, hand, strict=True)]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            by_hand = 1e6 * statistics.median(each[index] for each in hand) / updates
            print(f"{name}, {what}: {statistics.median(ratios):.3f} of the hand-written loop", end=" ")
            print(f"(quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}), {by_hand:.0f} us an update by hand")
        for contestant, counted in answer["collectives"].items():
            print(f"  {contestant}: in 2 epochs of 56 updates {counted}")


if __name__ == "__main__":
    main()
