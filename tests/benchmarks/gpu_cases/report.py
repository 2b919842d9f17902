"""The report of gpu.py in Markdown: the machine, a table per case, and each target beside what was measured."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Mapping

import torch

from gpu_cases.entry import Bench, Case, Found, Runs, Target, Task, ratios

NO_CLAIM = "not judged"
"""In the place of "met" and "missed" where times say nothing: on a CPU, and at tiny sizes."""


def facts(bench: Bench) -> dict[str, str]:
    """What the figures are of."""
    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found["python"] = platform.python_version()
    if bench.on_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found |= {"CUDA": str(torch.version.cuda), "driver": driver()}
    found["rounds"] = str(bench.rounds)
    return found


def driver() -> str:
    """The version of the driver, as its own tool tells; "unknown" where it is not there."""
    order = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(order, capture_output=True, check=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def header(bench: Bench, found: Mapping[str, str]) -> str:
    line = ", ".join(f"{name} {value}" for name, value in found.items())
    claims = bench.on_cuda and not bench.tiny
    return line + ("" if claims else "\n\nA dry run: everything runs and weights are compared; its times say nothing.")


def table(case: Case, task: Task, found: Found) -> str:
    """Times, memory, waits and weights of everybody, and who was left out."""
    base = case.contestants[0].name
    lines = [
        f"| contestant | us per update | / {base} | quartiles | peak, MB | mallocs | waits per update | differs by |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in case.contestants:
        runs = found[one.name]
        if runs.absent or runs.failed:
            why = f"left out: {runs.absent}" if runs.absent else f"failed: {runs.failed}"
            lines.append(f"| {one.name} | {why} | | | | | | |")
            continue
        cells = [f"{statistics.median(runs.seconds) * 1e6:.0f}", *spread(ratios(runs, found[base]))]
        cells += [_middle([one / 1e6 for one in runs.peak], ".0f"), _middle(runs.allocations, "g"), _waits(runs)]
        cells.append(_difference(task, runs, is_reference=one.equals is None))
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def notes(case: Case, found: Found) -> str:
    """What each contestant is, and the path that it says it took."""
    lines = []
    for one in case.contestants:
        if not found[one.name].absent:
            path = f" ({found[one.name].note})" if found[one.name].note else ""
            lines.append(f"- {one.name}: {one.note}{path}")
    return "\n".join([*lines, ""])


def weights(case: Case, task: Task, found: Found) -> str:
    """Say whose final weights were compared, and whether they agree."""
    compared = [one for one in case.contestants if one.equals and found[one.name].differs is not None]
    others = [one.name for one in compared if not agrees(task, found[one.name])]
    word = f"**not equal: {', '.join(others)}**" if others else "equal"
    names = ", ".join(f"{one.name} with {one.equals}" for one in compared) or "nobody"
    how = f"the norm of the difference is at most {task.tolerance:g} of that of the way the weights have gone"
    return f"Final weights compared in every round: {names}: {word} ({how}).\n"


def agrees(task: Task, runs: Runs) -> bool:
    return runs.differs is None or runs.differs <= task.tolerance


def judged(task: Task, found: Found, targets: list[Target]) -> list[dict[str, str]]:
    """Each target beside what was measured: its bound, the median, quartiles and a word."""
    claims = task.bench.on_cuda and not task.bench.tiny
    rows = []
    for target in targets:
        values = target.values(found)
        middle, quartiles = spread(values)
        word = NO_CLAIM if values is None or not claims else _word(target, values)
        rows.append(
            {"target": target.title, "bound": target.bound, "measured": middle, "quartiles": quartiles, "word": word}
        )
    return rows


def targets_table(rows: list[dict[str, str]]) -> str:
    lines = ["| target | bound | measured | quartiles | |", "|---|--:|--:|--:|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows), ""])


def sound(task: Task, found: Found) -> bool:
    """Whether nobody failed and all weights that were compared agree."""
    return all(not runs.failed and agrees(task, runs) for runs in found.values())


def spread(values: list[float] | None) -> list[str]:
    """The median, and the quartiles."""
    if not values:
        return ["", ""]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [f"{statistics.median(values):.3f}", f"{low:.3f} to {high:.3f}"]


def _word(target: Target, values: list[float]) -> str:
    return "met" if target.met(statistics.median(values)) else "**missed**"


def _middle(values: list[float] | list[int], form: str) -> str:
    return format(statistics.median(values), form) if values else ""


def _waits(runs: Runs) -> str:
    return ", ".join(f"{name.removeprefix('cuda')} {often:.2g}" for name, often in runs.syncs.items() if often)


def _difference(task: Task, runs: Runs, *, is_reference: bool) -> str:
    if runs.differs is None:
        return ""
    if is_reference:
        return f"{runs.differs:.1g} from itself"
    return f"{runs.differs:.1g}" + ("" if agrees(task, runs) else " **too much**")
