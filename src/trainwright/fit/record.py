"""What a Trainer holds of its fits: a record of the last one, and the placeholder of the run outside of `fit`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.errors import CheckpointError, TrainwrightError, message
from trainwright.core.records import Best


@dataclass(slots=True)
class UpdatePath:
    """How the updates of a stage are made, for `Trainer.fast_path`."""

    why_immediate: tuple[str, ...] | None = None
    """Why updates are checked one by one; empty where the check is deferred, None before the first run."""
    compiled: Any = None
    """The graphs that were compiled, in counts and words; None where nothing is compiled."""
    splits: Any = None
    """The splitter of windows for which memory runs out; None without `on_oom`."""

    def take_news(self) -> tuple[str, ...]:
        """Return lines on windows that were split since the last call."""
        return () if self.splits is None else tuple(self.splits.take_news())


@dataclass(slots=True)
class EvaluationRecord:
    """What an evaluation inside of a run shares with it, though `Trainer.evaluate` may be the user's own."""

    name: str | None = None
    """The name of the set that is evaluated, for `Trainer.evaluating`; None outside of evaluations."""
    errors: dict[str, float] = field(default_factory=dict)
    """Standard errors of the last evaluation, by the names of its numbers."""
    read_batches: Callable[[Iterator[Any]], Iterator[Any]] = iter
    """Wraps the batches of evaluations: a signal ends a validation of the run while it waits for data."""


@dataclass(slots=True)
class Outcome:
    """How a stage ended, as far as its counters do not say."""

    final_validation: dict[str, float] | None = None
    """The numbers of an early end at which no validation was due."""
    restored: Best | None = None
    """The best whose weights the model was left with."""
    save_error: CheckpointError | None = None
    """The error of the save at the end, where the run itself has ended well."""
    could_save: bool = False
    """Whether `on_error="save"` would have saved the state at the end, which is lost."""
    earlier: dict[str, Any] | None = None
    """How it ended in an earlier session, read from the checkpoint of a later stage."""
    lacks_weights: bool = False
    """Whether the weights of that end are gone: the model holds those that it was built with."""


@dataclass(slots=True)
class StageRecord:
    """One stage: made when it starts, read by evaluations until the next one starts.

    Where a `fit` is refused before its first update, the record before it is restored: the trainer is then as its last
    `fit` left it.
    """

    # Carried over from stage to stage.
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())
    """Marks the checkpoints of this run, and what trackers hold of it."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """How each finished stage ended, as a checkpoint of a later one saves it."""
    warns: bool = True
    """Whether mistakes in the first batch are warned of; a trial of a tool, one of many first batches, does not."""
    checked_metrics: set[str] = field(default_factory=set)
    """The metrics whose first batch was checked for a count in the place of a mean."""

    # How far the stage is.
    is_under_way: bool = False
    """Whether its `fit` has not returned yet."""
    has_begun: bool = False
    """Whether observers know of it: from then on it is not refused, and counts as a stage."""
    failed: bool = False
    """Whether it has not ended well: true from its first update to its end. A resume then continues the same stage."""
    follows_failure: bool = False
    """Whether the stage before it has failed."""
    caller: str = ""
    """The user's line that called a `fit` of one epoch; "-" once the header has named a loop of them."""
    notes: tuple[str, ...] = ()
    """Lines for its header."""

    # What others read of it, and what the next stage starts from.
    path: UpdatePath = field(default_factory=UpdatePath)
    evaluation: EvaluationRecord = field(default_factory=EvaluationRecord)
    outcome: Outcome = field(default_factory=Outcome)
    schedules: tuple[Any, ...] = ()
    """Its bound schedules; set when it is over."""
    weights: Any = None
    """Its evaluation weights, in addition to the trained ones; None where no loop has begun."""

    def next_stage(self) -> StageRecord:
        """The record of the `fit` that follows."""
        carried = {name: getattr(self, name) for name in ("run_id", "warns", "checked_metrics")}
        return StageRecord(**carried, stages=list(self.stages), is_under_way=True, follows_failure=self.failed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageRecord:
        """A copy for the copy of a trainer; TypeError where it refers to other weights or schedules of this one."""
        if self.schedules or (self.weights is not None and self.weights.average is not None):
            what = "copy.deepcopy of a Trainer that has trained with a schedule or an average"
            fix = "copy.deepcopy(trainer.model), and a Trainer of its own for the copy"
            raise TypeError(message(what, want="a Trainer as it was before its first fit", fix=fix))
        names = [field.name for field in fields(self) if field.name != "run_id" or self.has_begun]
        return StageRecord(**{name: copy.deepcopy(getattr(self, name), memo) for name in names})


class NotRunning:
    """Takes the place of the run outside of `fit`: every attribute raises TrainwrightError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise TrainwrightError(message("this works only while fit() is running", want="a call from a hook or a step"))


NOT_RUNNING: Any = NotRunning()
