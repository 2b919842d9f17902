"""The tables of peers.py, in Markdown, and its targets."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from contestants.entry import Contestant
from contestants.every import BY_NAME
from contestants.measuring import Times
from contestants.tasks import Task, task

OURS = ("trainwright", "trainwright-loader")
OTHER = ("trainwright-other", "plain-other")
TRAIN = {"W1": 0.95, "W2": 1.00, "W3": 1.00, "W4": 1.01}
"""The most that training may take beside the tuned loop."""
EVALUATE = {"W1": 1.05, "W2": 1.02, "W3": 1.02, "W4": 1.02}
"""The most that an evaluation may take beside the tuned one."""
FROM_OTHER, BESIDE_TEXTBOOK = 1.03, 0.45


def header(rounds: int) -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} thread, {rounds} rounds; output to the null device\n"
    )


def field(contestants: Sequence[Contestant]) -> str:
    """Tell who takes part, with versions, and who is not installed."""
    lines = ["| contestant | version | what |", "|---|---|---|"]
    for one in contestants:
        have = one.version()
        lines.append(f"| {one.name} | {'not installed' if have is None else have} | {one.note} |")
    return "\n".join(lines)


def times(of: Task, found: Mapping[str, Times], contestants: Sequence[Contestant]) -> str:
    """Tell one task: time per batch, ratios with quartiles, and whether the contestant ended where it should."""
    lines = [
        f"{of.name}: {of.workload.title}" + (", accumulate 4, clip 1.0, OneCycle" if of.full else ""),
        "",
        "| contestant | us per batch | / plain | quartiles | / tuned | quartiles | differs by |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for one in contestants:
        if (own := found.get(one.name)) is None:
            continue
        if own.failed:
            lines.append(f"| {one.name} | failed: {own.failed} | | | | | |")
            continue
        cells = [f"{statistics.median(own.thread) * 1e6:.0f}"]
        for base in (one.base, "tuned"):
            cells += spread(ratios(own, found.get(base)))
        cells.append(f"{own.differs:.1g}" + ("" if agrees(one, own) else " **too much**"))
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *busy(found), ""])


def agrees(one: Contestant, own: Times) -> bool:
    """Whether weights, or a mean loss, are those of the plain loop; who has another optimizer need not agree."""
    return one.tolerance is None or own.differs <= one.tolerance * own.grows


def busy(found: Mapping[str, Times]) -> list[str]:
    """Tell whose other threads worked too, since the thread's time leaves them out."""
    lines = []
    for name, own in found.items():
        if own.thread and (more := statistics.median(own.process) / statistics.median(own.thread)) > 1.02:
            lines.append(f"{name}: the process needed {more:.2f} times the CPU time of the thread.")
    return ["", *lines] if lines else []


def summary(found: Mapping[str, Mapping[str, Times]], contestants: Sequence[Contestant]) -> str:
    """Tell all tasks: ratios to the plain loop."""
    lines = [f"| / plain | {' | '.join(found)} |", "|---|" + "--:|" * len(found)]
    for one in contestants:
        cells = [spread(ratios(of[one.name], of.get(one.base)))[0] if one.name in of else "" for of in found.values()]
        if any(cells):
            lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def over_tuned(found: Mapping[str, Mapping[str, Times]], contestants: Sequence[Contestant]) -> str:
    """Tell all training tasks: microseconds per update over the tuned loop's of the same round."""
    measured = {name: of for name, of in found.items() if "tuned" in of and not of["tuned"].failed}
    lines = [f"| us over tuned per update | {' | '.join(f'{name} | quartiles' for name in measured)} |"]
    lines.append("|---|" + "--:|---|" * len(measured))
    for one in contestants:
        cells = [cell for name, of in measured.items() for cell in over(name, of.get(one.name), of["tuned"])]
        if any(cells):
            lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) if measured else ""


def over(name: str, own: Times | None, tuned: Times) -> list[str]:
    """Return the median difference per update in microseconds, and the quartiles."""
    if own is None or own.failed:
        return ["", ""]
    batches = task(name).accumulate
    found = [(a - b) * 1e6 * batches for a, b in zip(own.thread, tuned.thread, strict=True)]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return [f"{statistics.median(found):+.0f}", f"{low:+.0f} to {high:+.0f}"]


def judged(part: str, found: Mapping[str, Mapping[str, Times]]) -> str:
    """Tell each target beside what was measured."""
    lines = ["| target | at most | measured | quartiles | |", "|---|--:|--:|--:|---|"]
    for name, of in found.items():
        for ours, base, most in targets(part, name):
            if (measured := ratios(of.get(ours), of.get(base))) is not None:
                middle, quartiles = spread(measured)
                word = "met" if statistics.median(measured) <= most else "**missed**"
                lines.append(f"| {name}: {ours} / {base} | {most:.2f} | {middle} | {quartiles} | {word} |")
    return "\n".join(lines)


def targets(part: str, name: str) -> list[tuple[str, str, float]]:
    """Return (who, beside whom, at most) for one task."""
    workload = name.removesuffix("f")
    most = (TRAIN if part == "train" else EVALUATE)[workload]
    found = [(ours, "tuned", most) for ours in OURS]
    if part == "train":
        found.append((*OTHER, FROM_OTHER))
        if name == "W1":
            found += [(ours, "textbook", BESIDE_TEXTBOOK) for ours in OURS]
    return found


def ratios(own: Times | None, base: Times | None) -> list[float] | None:
    """Return the ratios of each round, or None where one of the two is not there."""
    if own is None or base is None or own.failed or base.failed:
        return None
    return [a / b for a, b in zip(own.thread, base.thread, strict=True)]


def spread(found: list[float] | None) -> list[str]:
    """Return the median, and the quartiles."""
    if found is None:
        return ["", ""]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return [f"{statistics.median(found):.3f}", f"{low:.3f} to {high:.3f}"]


def sound(found: Mapping[str, Mapping[str, Times]]) -> bool:
    """Whether nobody failed and all agree."""
    return all(not own.failed and agrees(BY_NAME[name], own) for of in found.values() for name, own in of.items())


def peaks(of: Task, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tell the greatest resident memory of short runs, and how much that is over the plain loop's."""
    lines = [f"{of.name}: {of.workload.title}", "", "| contestant | peak, MB | over plain |", "|---|--:|--:|"]
    middle = {
        name: statistics.median([one["peak"] for one in runs]) if all("peak" in one for one in runs) else None
        for name, runs in found.items()
    }
    for name, runs in found.items():
        own, plain = middle[name], middle.get("plain")
        if own is None:
            lines.append(f"| {name} | failed: {next(one['failed'] for one in runs if 'failed' in one)} | |")
        else:
            lines.append(f"| {name} | {own:.0f} | {'' if plain is None else f'{own - plain:+.1f}'} |")
    return "\n".join([*lines, ""])


def retained(of: Task, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Tell what memory grows by over 10,000 updates."""
    lines = [f"{of.name}: from update 1,000 to 11,000", "", "| contestant | MB | Python objects |", "|---|--:|--:|"]
    for name, own in found.items():
        cells = own.get("failed") or f"{own['retained']:+.2f} | {own['objects']:+}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join([*lines, ""])
