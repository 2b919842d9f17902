"""Every bundled example in a process of its own: whether it gives the result that its header states, and its time.

    python tests/benchmarks/examples.py [--only full_digits,dpo] [--device cuda|cpu] [--runs N] [--smoke] [--json FILE]

Times are of the whole process, imports among them, by the wall clock, one process after the other, each in an empty
directory. The command fails where an example fails or its result is not as stated; with `--smoke` nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = r"([\d.]+)% of the held-out digits"


@dataclass(frozen=True)
class Stated:
    """A number that an example prints last in this form, and what its header says of it."""

    pattern: str
    at_least: float | None = None
    at_most: float | None = None

    def found(self, text: str) -> float | None:
        """The number in what was printed; None where it is not there."""
        numbers = re.findall(self.pattern, text)
        return float(numbers[-1]) if numbers else None

    def holds(self, text: str) -> bool:
        """Whether it is there and as stated."""
        number = self.found(text)
        if number is None:
            return False
        low, high = (self.at_least is None or number >= self.at_least), (self.at_most is None or number <= self.at_most)
        return low and high

    def __str__(self) -> str:
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None) or "there"


STATED: dict[str, tuple[Stated, ...]] = {
    "advise": (Stated(r"x(\d+\.\d+)"),),
    "bare_digits": (Stated(r"val_accuracy (0\.9[89]\d+)", at_least=0.98),),  # at the best epoch
    "checkpointing": (Stated(r"every block .* (\d\.\d+)x .*the same bit for bit", at_most=1.3),),
    "compile": (Stated(r"losses differ by at most (\S+)", at_most=1e-2),),
    "cross_validation": (Stated(r"GridSearchCV: ([\d.]+)%", at_least=96),),
    "custom_function": (Stated(RIGHT, at_least=95),),
    "custom_operator": (Stated(RIGHT, at_least=90),),
    "custom_steps": (
        Stated(r"(\d+) of 10 digits drawn", at_least=10),
        Stated(r"coefficients: (\S+)", at_most=1e-6),
        Stated(r"student  ([\d.]+)% with the teacher", at_least=91),
        Stated(r"sam      ([\d.]+)% by sharpness-aware", at_least=93),
    ),
    "ddp_digits": (Stated(RIGHT, at_least=98),),
    "dpo": (Stated(r"after +([\d.]+)% of pairs", at_least=95), Stated(r"after .* ([\d.]+)% of its own", at_least=65)),
    "fashion_mnist": (Stated(r"([\d.]+)% of \d+ test pictures", at_least=98),),
    "finetune": (Stated(r"accuracy +(\d\.\d+)", at_least=0.94),),
    "fsdp_char_lm": (Stated(r"([\d.]+) bits per character", at_most=2.25),),
    "full_digits": (Stated(r"best +val_accuracy (\d\.\d+)", at_least=0.98),),
    "model_parallel": (Stated(RIGHT, at_least=97),),
    "own_loop": (Stated(r"best val_accuracy (\d\.\d+)", at_least=0.96),),
    "pruning": (Stated(r"half of the channels, tuned .*?([\d.]+)%", at_least=97),),
    "quickstart_digits": (Stated(RIGHT, at_least=97),),
    "tune_digits": (Stated(r"([\d.]+)% of the test digits", at_least=94),),
    "variable_length": (
        Stated(r"([\d.]+)% of the held-out lines", at_least=75),
        Stated(r"([\d.]+)% of what was read is padding", at_most=8),
    ),
}


@dataclass
class Run:
    """What one run of an example gave."""

    seconds: float
    returned: int
    numbers: list[float | None]
    as_stated: bool
    tail: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen examples; return 1 where one failed or gave another result than its header states."""
    args = parsed(arguments)
    facts = {"device": name_of(args.device), "torch": torch.__version__, "python": sys.version.split()[0]}
    print(" · ".join(facts.values()) + f" · {args.runs} run{'s' if args.runs > 1 else ''} each\n", flush=True)
    print("| example | stated | found | as stated | seconds |\n|---|---|---|---|---|", flush=True)
    found: dict[str, list[Run]] = {}
    for name in args.only:
        found[name] = [run(name, args.device, smoke=args.smoke) for _ in range(args.runs)]
        print(row(name, found[name], judged=not args.smoke), flush=True)
    if args.json is not None:
        runs = {name: [asdict(one) for one in each] for name, each in found.items()}
        args.json.write_text(json.dumps({"facts": facts, "smoke": args.smoke, "examples": runs}, indent=1))
    every = [one for each in found.values() for one in each]
    for name, each in found.items():
        for one in each:
            if one.returned:
                print(f"\n{name} ended with {one.returned}:\n{one.tail}", file=sys.stderr)
    return int(any(one.returned or not (args.smoke or one.as_stated) for one in every))


def run(name: str, device: str, *, smoke: bool) -> Run:
    """Run one example in an empty directory."""
    unseen = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *(["--smoke"] if smoke else [])]
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, **unseen},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        seconds = time.perf_counter() - begun
    stated, text = STATED[name], done.stdout
    numbers = [one.found(text) for one in stated]
    return Run(seconds, done.returncode, numbers, all(one.holds(text) for one in stated), text[-2000:])


def row(name: str, runs: Sequence[Run], *, judged: bool) -> str:
    """Return the line of one example; its time is the median."""
    stated, last = (
        ", ".join(map(str, STATED[name])),
        ", ".join("none" if n is None else f"{n:g}" for n in runs[-1].numbers),
    )
    good = "failed" if any(one.returned for one in runs) else "not judged"
    if judged and good != "failed":
        good = "yes" if all(one.as_stated for one in runs) else "**no**"
    return f"| {name}.py | {stated} | {last} | {good} | {statistics.median(one.seconds for one in runs):.1f} |"


def name_of(device: str) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name(0) if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(STATED))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="sizes that show that they run; nothing is judged")
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.only if name not in STATED]:
        parser.error(f"no example {unknown[0]!r}; there are: {', '.join(STATED)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; write --device cpu")
    return args


if __name__ == "__main__":
    sys.exit(main())
