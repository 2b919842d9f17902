"""One finding, and the silent trainer of the trials in which findings are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainwright.tools.trial import variant
from trainwright.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: what it is, why it matters, and the line to write instead."""

    name: str
    """In two or three words: "bias before BatchNorm"."""
    what: str
    """One sentence, with the layers or lines concerned."""
    why: str
    """What it costs, or what it harms."""
    fix: str
    """A line to paste."""
    where: tuple[str, ...] = ()
    """Layers, parameters, or lines as `file:line`."""
    level: Literal["problem", "note"] = "problem"
    """A note is worth a look, and often meant so."""

    def __str__(self) -> str:
        """The four parts, one a line."""
        return f"{self.name}: {self.what}\n  why   {self.why}\n  fix   {self.fix}"

    def to_dict(self) -> dict[str, Any]:
        """All parts as plain data."""
        return {**asdict(self), "where": list(self.where)}


def silent(trainer: Trainer[Any], **settings: Any) -> Trainer[Any]:
    """A trainer for a trial that compiles nothing, and goes on where a number is not finite."""
    fast = replace(trainer.fast, compile=None)
    return variant(trainer, fast=fast, on_nonfinite="ignore", **settings)
