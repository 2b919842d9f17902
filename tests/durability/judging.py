"""The uninterrupted run, and what is to be said of one that goes on after a fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import children
from .adapters import Adapter
from .task import Task, Tell

VERDICTS = ("ok", "error", "lost", "scratch", "mixed", "drift", "silent")
"""What can be said of a fault: all is right; it ends in an error; it goes on from an older state than was
acknowledged; from nothing although something was; from a state that never was; from a right one, and what follows
differs; from an older one without saying so."""


@dataclass(frozen=True)
class Subject:
    """What is tried: an adapter with its variant, on a task."""

    adapter: Adapter
    variant: str
    words: frozenset[str]
    task: Task

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.adapter.LIBRARY} {self.variant}".strip()

    def script(self, directory: Path, *, at: Callable[[str, int], None] | None = None) -> Callable[[int], None]:
        """The user's script in that directory, as `children.run` takes it."""
        return lambda fd: self.adapter.train(self.task, directory, Tell(fd, at=at), words=self.words)

    def run(self, directory: Path, *, when: children.When | None = None) -> children.Ended:
        """Run it in that directory, with a new log beside it."""
        log = directory.with_suffix(".log")
        log.unlink(missing_ok=True)
        return children.run(self.script(directory), log, when=when)


@dataclass
class Reference:
    """What an uninterrupted run has reported."""

    states: dict[int, tuple[str, ...]]
    """Update -> digests of weights and optimizer."""
    ended: tuple[str, ...]
    seconds: float
    starting: float
    """Seconds until training begins."""
    saving: float
    """Seconds from the update until its save is acknowledged."""
    ran: children.Ended = field(repr=False)


@dataclass
class Verdict:
    """What is said of one fault."""

    word: str
    behind: int = 0
    """Updates that had been made and were lost."""
    why: str = ""


def reference_of(subject: Subject, directory: Path) -> Reference:
    """Run it to its end, twice in a row: the second tells that a finished run is found again."""
    ran = subject.run(directory / "reference")
    if ran.code or not ran.lines or ran.lines[-1].what != "ended":
        raise SystemExit(f"{subject.name} does not even train undisturbed (exit code {ran.code}):\n{ran.log}")
    states = {line.update: line.words for line in ran.lines if line.what in ("resumed", "update")}
    made = {line.update: line.seconds for line in ran.lines if line.what == "update"}
    saves = [line.seconds - made[line.update] for line in ran.lines if line.what == "saved" and line.update in made]
    first = ran.first("resumed")
    assert first is not None
    end = ran.lines[-1]
    saving = statistics.median(saves) if saves else 0.01
    return Reference(states, end.words, end.seconds, first.seconds, saving, ran)


def judge(reference: Reference, ran: children.Ended, *, acked: int, made: int = 0) -> Verdict | None:
    """What to say of a fault after which `ran`; None where it was killed before it could show where it goes on."""
    first = ran.first("resumed")
    failed = ran.hung or (ran.code != 0 and not ran.struck)
    if first is None:
        return Verdict("error", why=_reason(ran)) if failed or not ran.struck else None
    behind = max(0, made - first.update)
    if reference.states.get(first.update) != first.words:
        return Verdict("mixed", behind, f"the state of update {first.update} is not the one that was trained")
    if first.update < acked:
        return Verdict("lost" if first.update else "scratch", behind, f"{first.update}, acknowledged {acked}")
    for line in ran.lines:
        right = reference.ended if line.what == "ended" else reference.states.get(line.update)
        if line.what in ("update", "ended") and line.words != right:
            return Verdict("drift", behind, f"{line.what} {line.update} after {first.update} differs")
    if failed:
        return Verdict("error", behind, _reason(ran))
    return Verdict("ok", behind)


def _reason(ran: children.Ended) -> str:
    if ran.hung:
        return "it hangs"
    lines = [line for line in ran.log.strip().splitlines() if line and not line.startswith(" ")]
    return f"exit code {ran.code}: {lines[-1][:200] if lines else ''}"


@dataclass
class Table:
    """Counts of verdicts, and how to see each of the bad ones again."""

    title: str
    verdicts: list[Verdict] = field(default_factory=list)
    repeat: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, command: str) -> None:
        """Take in one."""
        self.verdicts.append(verdict)
        text = f"{verdict.word}: {verdict.why}\n    {command}"
        if verdict.word != "ok" and text not in self.repeat:
            self.repeat.append(text)

    @property
    def counts(self) -> Counter[str]:
        """How often each was given."""
        return Counter(verdict.word for verdict in self.verdicts)

    def row(self) -> str:
        """One row of a table in Markdown."""
        counts = self.counts
        went_on = [verdict.behind for verdict in self.verdicts if verdict.word != "error"]
        behind = f"{statistics.median(went_on):g}" if went_on else "."
        numbers = [str(counts[word] or ".") for word in VERDICTS]
        return " | ".join([f"| {self.title}", str(len(self.verdicts)), *numbers, f"{behind} |"])


def show(tables: Sequence[Table], *, unit: str) -> None:
    """Print them as one table in Markdown."""
    print(f"| | {unit} | " + " | ".join(VERDICTS) + " | median updates lost |")
    print("|---|" + "--:|" * (len(VERDICTS) + 2))
    for table in tables:
        print(table.row())
