"""Sends a training the signals that end jobs, alone or with its loader workers, and judges what it saves."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from . import children
from .children import When
from .judging import Reference, Subject, Table, Verdict, judge, reference_of

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


def signal_all(
    subject: Subject, base: Path, *, times: int, seed: int, group: bool, command: str, note: Callable[[str], None]
) -> list[Table]:
    """Send each signal `times` times, at random moments of the training; `command` repeats one."""
    reference = reference_of(subject, base)
    note(f"{subject.name}: seed {seed}; undisturbed {reference.seconds:.2f} s")
    tables = []
    for name in SIGNALS:
        table = Table(f"{subject.name}, {name}{' to the group' if group else ''}")
        for n in range(seed, seed + times):
            verdict = _try(subject, reference, base, random.Random(f"{name} {n}"), getattr(signal, name), group)
            table.add(verdict, command.format(seed=n))
            if verdict.word != "ok":
                note(f"{name}, seed {n}: {verdict.word}: {verdict.why}")
            shutil.rmtree(base / "run", ignore_errors=True)
        tables.append(table)
    return tables


def _try(
    subject: Subject, reference: Reference, base: Path, rng: random.Random, sent: signal.Signals, group: bool
) -> Verdict:
    """Signal one run after some update, and go on with it."""
    after = rng.randrange(1, subject.task.updates - 4)
    each = (reference.seconds - reference.starting) / subject.task.updates
    ran = subject.run(base / "run", when=When(rng.uniform(0, 2 * each), f"update {after}", sent, group))
    children.end_group(children.groups)
    again = subject.run(base / "run")
    children.end_group(children.groups)
    children.groups.clear()
    made = ran.last("update")
    verdict = judge(reference, again, acked=ran.last("saved"), made=made)
    assert verdict is not None
    if verdict.word != "ok":
        return verdict
    if verdict.behind:
        return Verdict("lost", verdict.behind, f"update {made} had been made, it goes on from {made - verdict.behind}")
    right = (130, -sent) if sent == signal.SIGINT else (128 + sent,)
    if ran.code not in right:
        return Verdict("error", why=f"exit code {ran.code}, {right[0]} is usual\n{ran.log[-600:]}")
    return verdict
