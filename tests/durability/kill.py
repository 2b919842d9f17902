"""Kills trainings at random moments, one to three times in a row, and judges how each goes on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import children
from .children import Ended, When
from .judging import Reference, Subject, Table, Verdict, judge, reference_of

ROOM = 1.2
"""How far past the expected end of a phase its kills are spread."""


@dataclass
class _Trial:
    """One directory: killed, resumed and killed again, and in the end trained to the end."""

    seed: int
    acked: int = 0
    made: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    open: int = 0
    """Kills after which nothing has shown yet where training goes on."""
    pids: list[int] = field(default_factory=list)

    def take(self, reference: Reference, ran: Ended) -> None:
        """Judge the kills before this run by it."""
        if self.open:
            verdict = judge(reference, ran, acked=self.acked, made=self.made)
            if verdict is not None:
                self.verdicts += [verdict] * self.open
                self.open = 0
        self.acked = max(self.acked, ran.last("saved"))
        self.made = ran.last("update") or self.made
        self.open += ran.struck


def kill_many(
    subject: Subject, base: Path, *, kills: int, seed: int, command: str, note: Callable[[str], None] = print
) -> Table:
    """Kill `kills` times; the verdicts. `command` repeats one trial, where its seed is filled in."""
    reference = reference_of(subject, base)
    shutil.rmtree(base / "reference", ignore_errors=True)
    note(
        f"{subject.name}: seed {seed}; undisturbed {reference.seconds:.2f} s, "
        f"start {1000 * reference.starting:.0f} ms, save {1000 * reference.saving:.1f} ms"
    )
    table = Table(subject.name)
    while len(table.verdicts) < kills:
        trial = _try(subject, reference, base / f"trial-{seed}", seed)
        for verdict in trial.verdicts:
            table.add(verdict, command.format(seed=seed))
        if {verdict.word for verdict in trial.verdicts} <= {"ok"}:
            shutil.rmtree(base / f"trial-{seed}", ignore_errors=True)
        else:
            note(f"{table.repeat[-1]}\n    left in {base / f'trial-{seed}'}")
        seed += 1
    return table


def _try(subject: Subject, reference: Reference, directory: Path, seed: int) -> _Trial:
    """Kill one training one to three times, then let it end. Workers of the dead live on while it is resumed."""
    rng, trial = random.Random(seed), _Trial(seed)
    directory.mkdir()
    try:
        for nth in range(rng.choice((1, 2, 3))):
            when = _moment(rng, subject, reference, first=nth == 0, made=trial.made)
            ran = subject.run(directory / "run", when=when)
            trial.take(reference, ran)
            if ran.code != 0 and not ran.struck:
                return trial
            if rng.random() < 0.5:
                children.end_group(children.groups)
        ran = subject.run(directory / "run")
        trial.take(reference, ran)
        if not ran.code and trial.verdicts and trial.verdicts[-1].word == "ok" and ran.lines[-1].what != "ended":
            trial.verdicts[-1] = Verdict("error", why="it ended early without an error")
    finally:
        children.end_group(children.groups)
        children.groups.clear()
    return trial


def _moment(rng: random.Random, subject: Subject, reference: Reference, *, first: bool, made: int) -> When:
    """Any moment of the run, one of its start, or one while it saves."""
    task = subject.task
    kinds = ("any", "save", "save") if first else ("any", "start", "save", "save")
    dues = [update for update in range(task.every, task.updates + 1, task.every) if update > made]
    kind = rng.choice(kinds)
    if kind == "start":
        return When(rng.uniform(0, ROOM * reference.starting))
    if kind == "save" and dues:
        return When(rng.uniform(0, ROOM * reference.saving), f"update {rng.choice(dues)}")
    left = reference.seconds * (1 - made / task.updates)
    return When(rng.uniform(0, reference.starting + left))
