"""What several processes cost: Trainer against a hand-written loop under torch's DDP, on gloo.

    python tests/benchmarks/processes.py [--rounds 15] [--epochs 2] [--processes 2] [--models MLP CNN]

Each process has a core of its own, where the system can give it one, and runs the contestants in turn; wall time and
CPU time of the first process over 80 updates inside each epoch of 168 but the first, and, listed apart, what the end of
an epoch takes. Ratios are taken within a round, medians over the rounds. All end with the same weights (checked).
The hand-written loop is what a good engineer writes: fused optimizer, in-memory batches dealt by rank, DDP with its
gradients in the buckets, losses kept as tensors. It takes the mean of the processes' means, which is right here because
all slices are equally long. A third contestant is the same loop with the check that is on by default in trainwright: no
step with a gradient that is not finite. It says what of the ratio is the check, and what is the Trainer.

Collectives are counted by torch's profiler over the updates of one more epoch; what falls due about once a second or at
the end of an epoch is listed apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contestants import tasks
from overhead import cnn, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwright import DDP, Observer, Trainer, Updates, batches, launch
from trainwright.observers import Update

BATCH = 32


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "MLP, 9 k weights": (mlp, False),
    "MLP, 1.1 M weights": (wide, False),
    "CNN, 10 k weights": (cnn, True),
}


def digits(*, image: bool, passes: int) -> tuple[Tensor, Tensor]:
    inputs, targets = (rows.repeat(passes, *[1] * (rows.ndim - 1)) for rows in tasks.digits())
    return inputs.view(-1, 8, 8) if image else inputs, targets


PASSES, EVERY = 3, 80
"""How often an epoch goes over the 1,792 rows, and every how many updates the time is noted: twice in each epoch."""
Marks = list[tuple[float, float]]
"""Wall time and CPU time at every 80th update, on the first process."""


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Watches(Observer):
    """Notes the time now and then."""

    every = Updates(EVERY)

    def __init__(self) -> None:
        self.marks: Marks = []

    def on_update(self, update: Update) -> None:
        self.marks.append(now())


def by_hand(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, *, checked: bool = False) -> Marks:
    """A loop under DDP as one writes it who knows how; where `checked`, with an error for gradients not finite."""
    inputs, targets = data
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    own, marks, updates = BATCH // size, Marks(), 0
    parameters, found, one = list(model.parameters()), torch.zeros(()), torch.ones(())
    for _ in range(epochs):
        losses = []
        for start in range(rank * own, len(targets), BATCH):
            x, y = inputs[start : start + own].clone(), targets[start : start + own].clone()
            optimizer.zero_grad()
            loss = loss_function(ddp(x), y)
            loss.backward()
            if checked:
                gradients = [parameter.grad for parameter in parameters]
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
                if found.item():
                    raise RuntimeError("a gradient is not finite")
            optimizer.step()
            losses.append(loss.detach())
            updates += 1
            if updates % EVERY == 0:
                marks.append(now())
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
    return marks


def by_trainer(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int) -> Marks:
    """The same in trainwright."""
    watches = Watches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel = DDP(find_unused_parameters=False)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, parallel=parallel, observers=[watches])
    trainer.fit(batches(data, BATCH), epochs=epochs)
    return watches.marks


CONTESTANTS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor], int], Marks]] = {
    "by hand": by_hand,
    "by hand, checked": partial(by_hand, checked=True),
    "trainwright": by_trainer,
}


def measure(names: list[str], rounds: int, epochs: int) -> dict[str, Any]:
    """On each process: time the contestants in turn, and count what the collectives of an epoch are."""
    torch.set_num_threads(1)
    Trainer(nn.Linear(1, 1))  # makes the process group
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    answers: dict[str, Any] = {}
    for name in names:
        make, image = MODELS[name]
        data = digits(image=image, passes=PASSES)
        times: dict[str, list[Marks]] = {contestant: [] for contestant in CONTESTANTS}
        ends: dict[str, Tensor] = {}
        for number in range(rounds + 1):  # the first warms up
            order = deque(CONTESTANTS)
            order.rotate(number)
            for contestant in order:
                torch.manual_seed(0)
                model = make()
                dist.barrier()
                noted = CONTESTANTS[contestant](model, data, epochs + 1)
                if number:
                    times[contestant].append(noted)
                ends[contestant] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(ends["trainwright"], ends["by hand"], rtol=1e-3, atol=1e-4)
        short = digits(image=image, passes=1)
        counted = {contestant: collectives(run, make(), short) for contestant, run in CONTESTANTS.items()}
        answers[name] = {"times": times, "collectives": counted}
    return answers


def collectives(run: Callable[..., None], model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, int]:
    """How many collectives three epochs have more than one: what updates and epoch ends cost, not the start."""
    counts = []
    for epochs in (1, 3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(model, data, epochs)
        counts.append(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))
    return {name: counts[1][name] - counts[0][name] for name in sorted(counts[1])}


def inside(marks: Marks, index: int) -> float:
    """Seconds per update inside the epochs, the first one left out."""
    return statistics.mean(marks[i + 1][index] - marks[i][index] for i in range(2, len(marks) - 1, 2)) / EVERY


def at_ends(marks: Marks) -> float:
    """Seconds that the end of an epoch takes, beside the updates around it."""
    return statistics.mean(marks[i][0] - marks[i - 1][0] for i in range(2, len(marks), 2)) - EVERY * inside(marks, 0)


def ratio(some: list[Marks], others: list[Marks], index: int) -> str:
    """The median over the rounds, and the quartiles."""
    ratios = [inside(one, index) / inside(other, index) for one, other in zip(some, others, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{statistics.median(ratios):.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=2, help="epochs that are measured, after a first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=[""], help="beginnings of their names")
    options = parser.parse_args()
    names = [name for name in MODELS if name.startswith(tuple(options.models))]
    answers = launch(measure, names, options.rounds, options.epochs, processes=options.processes)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.processes} processes on gloo, one")
    print(f"thread each; {options.rounds} rounds of {options.epochs} epochs\n")
    for name, answer in answers.items():
        hand, checked, ours = answer["times"].values()
        print(f"{name}: {1e6 * statistics.median(inside(each, 0) for each in hand):.0f} us an update by hand")
        for what, index in (("wall time", 0), ("CPU time", 1)):
            for title, some, others in (
                ("trainwright / by hand", ours, hand),
                ("by hand, checked / by hand", checked, hand),
                ("trainwright / by hand, checked", ours, checked),
            ):
                print(f"  {what}, {title}: {ratio(some, others, index)}")
        ends = [1e3 * statistics.median(at_ends(each) for each in some) for some in (hand, ours)]
        print(f"  the end of an epoch: {ends[0]:.1f} ms by hand, {ends[1]:.1f} ms in trainwright")
        for contestant, counted in answer["collectives"].items():
            print(f"  {contestant}: in 2 epochs of 56 updates {counted}")


if __name__ == "__main__":
    main()
