"""What one step of each optimizer takes, beside the forward and backward of the model.

    python tests/benchmarks/optimizers.py
    python tests/benchmarks/optimizers.py --learn adamw muon     # what the same 200 updates learn, by several rates

Prints the median of the milliseconds of a step, with the quartiles, in runs that take turns, on one thread.
"""

from __future__ import annotations

import argparse
import math
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainwright import Cosine, Trainer, adamw, batches, sgd
from trainwright.optim import Lamb, Lars, muon, param_groups

FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD, fused": sgd(lr=1e-3),
    "SGD, foreach": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True),
    "SGD, a loop": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False),
    "Lars": lambda model: Lars(param_groups(model, lr=1e-3), lr=1e-3),
    "AdamW, fused": adamw(lr=1e-3),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "AdamW, a loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
    "Lamb": lambda model: Lamb(param_groups(model, lr=1e-3), lr=1e-3),
    "Muon and AdamW": muon(lr=1e-3, others=()),
}


def network(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(blocks)]
    return nn.Sequential(*layers)


def timed(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return 1e3 * (perf_counter() - start)


def learn(makers: dict[str, Callable[..., Any]], rates: tuple[float, ...], *, updates: int) -> None:
    """Bits a character of held-out text by the writer of `examples/fsdp_char_lm.py`, by several rates."""
    path = Path(__file__).parents[2] / "examples" / "fsdp_char_lm.py"
    example = runpy.run_path(str(path))
    cut = len(example["TEXT"]) * 9 // 10
    train, held_out = example["pieces"](example["TEXT"][:cut]), example["pieces"](example["TEXT"][cut:])
    for name, make in makers.items():
        for rate in rates:
            torch.manual_seed(0)
            made = make(lr=rate, weight_decay=0.1)
            settings: dict[str, Any] = {"clip": 1.0, "schedule": Cosine(warmup=0.1), "console": False, "device": "cpu"}
            trainer = Trainer(example["Writer"](), made, nn.CrossEntropyLoss(), **settings)
            took = timed(lambda t=trainer: t.fit(batches(train, 32, shuffle=True, seed=0), max_updates=updates))
            bits = trainer.evaluate(batches(held_out, 128))["val_loss"] / math.log(2)
            print(f"{name:5} lr {rate:<6g} {bits:.3f} bits, {took / updates:.0f} ms an update", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--learn", nargs="+", choices=("adamw", "muon"), default=())
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.02, 0.04, 0.08])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.learn:
        learn({name: globals()[name] for name in args.learn}, tuple(args.rates), updates=200)
        return
    made = {name: (model := network(args.width, args.blocks), make(model)) for name, make in FORMS.items()}
    x = torch.randn(8, 32, args.width)
    took: dict[str, list[float]] = {name: [] for name in ("forward and backward", *FORMS)}
    for run in range(args.runs + 2):  # the first two warm up, and make the state
        for name, (model, optimizer) in made.items():
            optimizer.zero_grad()
            passes = timed(lambda model=model: model(x).square().mean().backward())
            step = timed(optimizer.step)
            if run > 1:
                took[name].append(step)
                took["forward and backward"].append(passes)
    weights = sum(p.numel() for p in network(args.width, args.blocks).parameters())
    print(f"{weights / 1e6:.1f} million parameters, torch {torch.__version__}, one thread, n={args.runs}")
    for name, times in took.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name:22} {middle:8.1f} ms   ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
