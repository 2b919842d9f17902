"""Correctness beside a plain loop, Lightning, Accelerate, the Trainer of transformers and Ignite, at their defaults.

    pip install torch==2.13.0 && pip install -e . --group peers     # in an environment of its own
    python tests/benchmarks/correctness.py killed              # or window, tokens, validation, nan, monitor, import
    python tests/benchmarks/correctness.py                     # all of them
        [--libraries trainwright,plain] [--kills 50] [--rounds 15] [--out docs/benchmarks]

One command per row of the table in the README. The programs stand in `programs/`, one file per library, written as the
library's documentation shows. Each runs in a process of its own. With `--out` the results replace those of the same
rows and libraries in `correctness.json` there, and `correctness.md` is rendered from it. Without, they are printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from programs import NAMES  # noqa: E402

TITLES = {
    "trainwright": "trainwright",
    "plain": "plain loop",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "Trainer of transformers",
    "ignite": "Ignite",
}
MARK = "@@result "
WITHIN = 10
"""Updates between two saves where a run is saved within its epochs."""


def program(name: str) -> ModuleType:
    """The programs of one library."""
    return importlib.import_module(f"programs.of_{name}")


# Rows: what runs in the process of one library


def difference(reference: Any, begun: Any, found: Any) -> float:
    """The distance of the weights from the reference's, over the distance that the reference has moved."""
    import torch

    flat = [torch.cat([value.detach().flatten() for value in one.parameters()]) for one in (reference, begun, found)]
    return float((flat[2] - flat[0]).norm() / (flat[0] - flat[1]).norm())


def one_big_batch(row: str) -> tuple[Any, Any]:
    """The model after a plain loop over batches as large as the windows, and the model as it was before."""
    from programs import common
    from torch import nn

    made, data, size, lr = {
        "window": (lambda: common.digits_model().double(), common.exact_digits, 32 * common.ACCUMULATE_ROWS, 0.1),
        "tokens": (common.tagger, common.sentences, 8 * common.ACCUMULATE_TOKENS, 1.0),
    }[row]
    model = made()
    optimizer = common.sgd(model, lr)
    for x, y in common.loader(data(), size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, made()


def differences(name: str, row: str) -> dict[str, float]:
    """How far each of the library's ways ends from one big batch."""
    reference, begun = one_big_batch(row)
    ways = getattr(program(name), row)()
    return {
        way: difference(*found) if isinstance(found, tuple) else difference(reference, begun, found)
        for way, found in ways.items()
    }


def kills(name: str, number: int, seed: int, every: int | None) -> dict[str, Any]:
    """Kill runs at drawn moments after a first checkpoint is complete, start each again, and see how it ends."""
    from programs import common
    from tests.durability import children

    own, drawn = program(name), random.Random(seed)
    first = 1 if every is None else 2  # epochs before the checkpoint from which on a run may be killed
    importlib.import_module("torch._dynamo")
    exec(own.SCRIPT_IMPORTS, {})
    with tempfile.TemporaryDirectory() as root:

        def script(folder: Path) -> Callable[[int], None]:
            return lambda fd: own.killed(folder, every, common.Log(fd, first))

        children.prepare()
        reference = children.run(script(Path(root) / "reference"), Path(root) / "reference.log")
        assert reference.code == 0 and reference.lines[-1].what == "ended", reference.log
        outcomes: list[dict[str, Any]] = []
        tries = 0
        while len(outcomes) < number:
            tries += 1
            assert tries < 20 * number + 20, "most runs end before they are killed"
            folder, log = Path(root) / f"run{tries}", Path(root) / f"run{tries}.log"
            begun = next(line.seconds for line in reference.lines if line.what == "saved")
            delay = drawn.uniform(0.0, reference.lines[-1].seconds - begun)
            killed = children.run(script(folder), log, when=children.When(delay, "saved 1"))
            if not killed.struck or killed.code != -9:
                assert killed.code == 0, killed.log
                reference = killed  # it was faster: the moments are drawn from its length from now on
                continue
            again = children.run(script(folder), Path(root) / f"run{tries}-again.log")
            outcomes.append(judged(reference, killed, again))
    reasons = Counter(one["reason"] for one in outcomes if one["reason"])
    return {
        "kills": number,
        "resumes": sum(one["resumes"] for one in outcomes),
        "ends_bit_equal": sum(one["equal"] for one in outcomes),
        "reasons": dict(reasons),
        "every": every or "epoch",
        "seed": seed,
        "seconds_of_a_run": round(reference.lines[-1].seconds, 2),
    }


def judged(reference: Any, killed: Any, again: Any) -> dict[str, Any]:
    """Whether the second start trained on from a checkpoint to its end, and with which bits."""
    ended = again.code == 0 and bool(again.lines) and again.lines[-1].what == "ended"
    first = again.first("epoch")
    scratch = ended and first is not None and first.update == 0 and killed.last("epoch") > 0
    reason = ""
    if not ended:
        lines = [line for line in again.log.strip().splitlines() if line and not line.startswith(" ")]
        reason = re.sub(r"/\S*/|\d{3,}", "", lines[-1])[:160] if lines else f"exit code {again.code}"
    elif scratch:
        reason = "starts from nothing"
    return {
        "resumes": ended and not scratch,
        "equal": ended and again.lines[-1].words == reference.lines[-1].words,
        "reason": reason,
    }


def child(name: str, row: str, number: int, seed: int) -> Any:
    """The result of one library in one row, in this process."""
    import torch

    torch.set_num_threads(1)
    if row == "killed":
        found = {"at epoch ends": kills(name, number, seed, None)}
        if name != "plain":  # the tutorial saves at epoch ends alone
            found["within epochs"] = kills(name, number, seed, WITHIN)
        return found
    if row in ("window", "tokens"):
        return differences(name, row)
    return getattr(program(name), row)()


# Rows: what starts these processes


def started(name: str, row: str, number: int, seed: int) -> Any:
    """Run one row of one library in a fresh process, validation in two; return its result."""
    command = [sys.executable, __file__, row, "--child", name, "--kills", str(number), "--seed", str(seed)]
    if row == "validation":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600, cwd=folder)
    results = [line for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not results:
        raise SystemExit(f"{name}, {row}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(results[-1].partition(MARK)[2])


def true_numbers() -> dict[str, float]:
    """The validation's loss and accuracy over all 397 rows at once, in one process."""
    import torch
    from programs import common
    from torch import nn

    torch.set_num_threads(1)
    x, y = common.digits()[1].tensors
    model = common.trained_digits()
    with torch.no_grad():
        output = model(x)
    return {
        "loss": nn.functional.cross_entropy(output.double(), y).item(),
        "accuracy": (output.argmax(1) == y).double().mean().item(),
        "rows": len(y),
    }


def imports(names: list[str], rounds: int) -> dict[str, Any]:
    """CPU-seconds of what a script imports, over `import torch`; in turns, without the first round."""
    script = "import time, torch; begun = time.process_time(); {}; print(time.process_time() - begun)"
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as compiled:
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": compiled, "OMP_NUM_THREADS": "1"}
        for number in range(rounds + 1):
            for name in names if number % 2 else names[::-1]:
                code = script.format(program(name).SCRIPT_IMPORTS)
                order = [sys.executable, "-W", "ignore", "-c", code]
                done = subprocess.run(order, capture_output=True, text=True, check=True, env=environment)
                seconds[name] += [float(done.stdout.split()[-1])] if number else []
    return {
        name: {
            "import": program(name).SCRIPT_IMPORTS,
            "median": statistics.median(found),
            "quartiles": statistics.quantiles(found, n=4)[::2],
            "seconds": found,
        }
        for name, found in seconds.items()
    }


ROWS = ("killed", "window", "tokens", "validation", "nan", "monitor", "import")


def measured(row: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One row of all libraries, with where and when it was measured."""
    begun = time.perf_counter()
    if row == "import":
        found = imports(names, args.rounds)
    else:
        found = {name: started(name, row, args.kills, args.seed) for name in names}
    if row == "validation":
        found["true"] = true_numbers()
    return {
        "found": found,
        "command": f"python tests/benchmarks/correctness.py {row}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions(names),
        "took_seconds": round(time.perf_counter() - begun),
    }


def versions(names: list[str]) -> dict[str, str]:
    """The versions of torch, Python and the libraries."""
    found = {"torch": version("torch"), "python": platform.python_version(), "machine": platform.machine()}
    return found | {package: version(package) for name in names if (package := program(name).PACKAGE)}


# Tables

MARK_OF_OTHER_WAYS = "¹"
"""Behind the default's number, where the library's guide shows lines of the user's own that give another."""


def lines_of(row: str, found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The lines of the table that a row of the benchmark gives: title -> library -> cell."""
    if row == "killed":
        return killed_lines(found)
    if row in ("window", "tokens"):
        title = {"window": "accumulation, a short last window", "tokens": "accumulation over tokens"}[row]
        cells = {name: marked(one, share) for name, one in found.items()}
        return {f"{title}: difference from one big batch": cells}
    if row == "validation":
        true, lines = found["true"], {}
        for number in ("accuracy", "loss"):
            title = f"validation of {true['rows']} rows on 2 processes: {number} (true: {true[number]:.5f})"
            lines[title] = {
                name: marked({way: numbers[number] for way, numbers in one.items()}, lambda value: f"{value:.5f}")
                for name, one in found.items()
                if name != "true"
            }
        return lines
    if row == "nan":
        return {"a NaN in one batch: stops before the update": {name: nan_cell(one) for name, one in found.items()}}
    if row == "monitor":
        title = "a misspelt monitor: updates made before the error"
        return {title: {name: monitor_cell(one) for name, one in found.items()}}
    return {"import, CPU-seconds over `import torch`": {name: f"{one['median']:.2f}" for name, one in found.items()}}


def killed_lines(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Four lines: resumes and ends bit-equal, saved at the ends of epochs and within them."""
    lines: dict[str, dict[str, str]] = {}
    for saved, words in (("at epoch ends", "saved each epoch"), ("within epochs", f"saved every {WITHIN} updates")):
        for key, end in (("resumes", "resumes"), ("ends_bit_equal", "ends bit-equal")):
            lines[f"killed at random, {words}: {end}"] = {
                name: f"{one[saved][key]} of {one[saved]['kills']}" if saved in one else "user's code"
                for name, one in found.items()
            }
    return lines


def share(value: float) -> str:
    """A share in per cent; the rounding of float64 is called 0."""
    return f"{100 * value:.1f} %" if value >= 1e-12 else "0"


def marked(found: dict[str, float], text: Callable[[float], str]) -> str:
    """The default's number, and a mark where the user can write something else."""
    return text(found["default"]) + (f" {MARK_OF_OTHER_WAYS}" if len(found) > 1 else "")


def nan_cell(one: dict[str, Any]) -> str:
    """Who stops before the update."""
    if one["error"] and one["finite_weights"]:
        return "yes"
    return "no" if not one["finite_weights"] else "skips it"


def monitor_cell(one: dict[str, Any]) -> str:
    """How many updates are made before the error."""
    if "offered" in one:
        return "offered" if one["offered"] else "not offered"
    if not one["error"]:
        return "no error"
    return str(one["updates"]) + (f" ({one['note']})" if "note" in one else "")


def table(rows: dict[str, Any]) -> str:
    """The table of all rows in Markdown."""
    names = [name for name in NAMES if any(name in row["found"] for row in rows.values())]
    known: dict[str, str] = {}
    for row in rows.values():
        known |= row["versions"]
    packages = {name: program(name).PACKAGE for name in names if name != "trainwright"}
    titles = [f"{TITLES[name]} {known.get(packages.get(name), '')}".strip() for name in names]
    lines = [f"| row | | {' | '.join(titles)} |", "|---|---|" + "--:|" * len(names)]
    for row in ROWS:
        if row in rows:
            for title, found in lines_of(row, rows[row]["found"]).items():
                cells = " | ".join(found.get(name, "not measured") for name in names)
                lines.append(f"| `{row}` | {title} | {cells} |")
    return "\n".join(lines)


def page(text: str, rows: dict[str, Any]) -> str:
    """The page with its table of these rows replaced."""
    return re.sub(r"^\| row \|.*?\n(?=\n)", lambda _: table(rows) + "\n", text, flags=re.S | re.M)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen rows, print the table and the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; all where none is given")
    parser.add_argument("--libraries", default=",".join(NAMES))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a folder with correctness.md: replace the rows there and in the JSON")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := [row for row in args.rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are: {', '.join(ROWS)}")
    if unknown := [name for name in args.libraries.split(",") if name not in NAMES]:
        parser.error(f"no library {unknown[0]!r}; there are: {', '.join(NAMES)}")
    if args.child:
        found = child(args.child, args.rows[0], args.kills, args.seed)
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{MARK}{json.dumps(found)}", flush=True)
        return 0
    names = [name for name in args.libraries.split(",") if installed(name)]
    rows: dict[str, Any] = {}
    for row in args.rows or ROWS:
        rows[row] = measured(row, names, args)
        print(f"{row}: {rows[row]['took_seconds']} s", file=sys.stderr, flush=True)
        if args.out is not None:  # after each row: they take minutes
            written = args.out / "correctness.json"
            rows = merged(json.loads(written.read_text()) if written.exists() else {}, rows)
            written.write_text(json.dumps(rows, indent=1) + "\n")
            text = args.out / "correctness.md"
            text.write_text(page(text.read_text(), rows))
    print(table(rows))
    print(json.dumps(rows))
    return 0


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new results, with the old ones of other rows, and of other libraries in the same rows."""
    for row, found in new.items():
        if row in old:
            found["found"] = old[row]["found"] | found["found"]
            found["versions"] = old[row]["versions"] | found["versions"]
    return {row: (old | new)[row] for row in ROWS if row in old | new}


def installed(name: str) -> bool:
    """Whether a library can take part; a note where it cannot."""
    package = program(name).PACKAGE
    try:
        return package is None or bool(version(package))
    except PackageNotFoundError:
        print(f"{name} is not installed and does not take part", file=sys.stderr)
        return False


if __name__ == "__main__":
    sys.exit(main())
