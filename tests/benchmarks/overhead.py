"""What the loop costs: Trainer against the plain and a tuned loop, training and evaluation, from ready batches.

    python tests/benchmarks/overhead.py [--rounds 15] [--epochs 20] [--markdown]

One thread, one process, contestants in alternating order; CPU time of the thread; each ratio is taken within a round
against the tuned loop of the same round; medians over the rounds. All contestants end with the same weights (checked).
The tuned loop is what a good engineer writes by hand: fused optimizer, losses kept as tensors, nothing read per step.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from contestants import tasks
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import Trainer

Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *tasks.cnn())


def digits(batch_size: int, *, image: bool) -> Batches:
    x, y = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    inputs = inputs.view(-1, 8, 8) if image else inputs
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def plain(model: nn.Module, data: Batches, epochs: int) -> None:
    """The loop of the textbooks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        total = 0.0
        for inputs, target in data:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), target)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)


def tuned(model: nn.Module, data: Batches, epochs: int) -> None:
    """The same, with nothing read before the epoch's end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(epochs):
        losses = []
        for inputs, target in data:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_function(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()


def trained(model: nn.Module, data: Batches, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False).fit(data, epochs=epochs)


def plain_evaluation(model: nn.Module, data: Batches, epochs: int) -> None:
    for _ in range(epochs):
        model.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, target in data:
                total += F.cross_entropy(model(inputs), target).item() * len(inputs)
        model.train()


def tuned_evaluation(model: nn.Module, data: Batches, epochs: int) -> None:
    for _ in range(epochs):
        model.eval()
        losses, rows = [], 0
        with torch.no_grad():
            for inputs, target in data:
                losses.append(F.cross_entropy(model(inputs), target, reduction="sum"))
                rows += len(inputs)
        model.train()
        torch.stack(losses).sum(dtype=torch.float64).item() / rows


def trained_evaluation(model: nn.Module, data: Batches, epochs: int) -> None:
    trainer = Trainer(model, None, nn.CrossEntropyLoss(), console=False)
    for _ in range(epochs):
        trainer.evaluate(data)


def measure(
    make: Callable[[], nn.Module],
    data: Batches,
    contestants: dict[str, Callable[..., None]],
    *,
    epochs: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of thread time per update, by contestant, round by round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        order = list(contestants) if number % 2 else list(contestants)[::-1]
        weights = {}
        for name in order:
            torch.manual_seed(0)
            model = make()
            begun = time.thread_time()
            contestants[name](model, data, epochs)
            spent = time.thread_time() - begun
            if number:  # the first round warms up
                times[name].append(spent / (epochs * len(data)))
            weights[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = next(iter(weights.values()))
        assert all(torch.equal(first, other) for other in weights.values()), "the contestants differ"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread, ", end="")
    print(f"{args.rounds} rounds of {args.epochs} epochs\n")
    print("| workload | tuned, us | plain / tuned | Trainer / tuned | quartiles | Trainer / plain |")
    print("|---|--:|--:|--:|--:|--:|")
    train = {"plain": plain, "tuned": tuned, "trainer": trained}
    evaluate = {"plain": plain_evaluation, "tuned": tuned_evaluation, "trainer": trained_evaluation}
    for title, make, data in (
        ("MLP 64-64-10, batch 32", mlp, digits(32, image=False)),
        ("CNN 16-32, batch 64", cnn, digits(64, image=True)),
    ):
        row(f"{title}, train", measure(make, data, train, epochs=args.epochs, rounds=args.rounds))
        times = measure(make, data * 10, evaluate, epochs=max(1, args.epochs // 10), rounds=args.rounds)
        row(f"{title}, evaluate, a pass of {10 * len(data)} batches", times)
        times = measure(make, data, evaluate, epochs=args.epochs, rounds=args.rounds)
        row(f"{title}, evaluate, a pass of {len(data)} batches", times)


def row(title: str, times: dict[str, list[float]]) -> None:
    def ratios(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(times[a], times[b], strict=True)]

    ours = ratios("trainer", "tuned")
    low, _, high = statistics.quantiles(ours, n=4)
    print(
        f"| {title} | {statistics.median(times['tuned']) * 1e6:.0f} "
        f"| {statistics.median(ratios('plain', 'tuned')):.3f} "
        f"| {statistics.median(ours):.3f} | {low:.3f} to {high:.3f} "
        f"| {statistics.median(ratios('trainer', 'plain')):.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
