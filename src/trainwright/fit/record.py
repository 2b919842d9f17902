"""The record of a Trainer's last `fit`, and the placeholder of the run outside of `fit`."""

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
    """The path of a stage's updates, for `Trainer.fast_path`."""

    why_immediate: tuple[str, ...] | None = None
    """Reasons for an immediate check; empty if the check is deferred, None before the first run."""
    compiled: Any = None
    """Description of the compiled graphs; None if nothing is compiled."""
    splits: Any = None
    """The splitter of windows that do not fit in memory; None without `on_oom`."""

    def take_news(self) -> tuple[str, ...]:
        """Return one line for each window that was split since the last call."""
        return () if self.splits is None else tuple(self.splits.take_news())


@dataclass(slots=True)
class EvaluationRecord:
    """State shared by a run and its evaluations, also if `Trainer.evaluate` is overridden."""

    name: str | None = None
    """Name of the set under evaluation, for `Trainer.evaluating`; None outside of evaluations."""
    errors: dict[str, float] = field(default_factory=dict)
    """Standard errors of the last evaluation, by name of the number."""
    read_batches: Callable[[Iterator[Any]], Iterator[Any]] = iter
    """Wraps the batches of evaluations, so that a signal can end a validation while it waits for data."""


@dataclass(slots=True)
class Outcome:
    """The end of a stage, in addition to its counters."""

    final_validation: dict[str, float] | None = None
    """The numbers of the validation at an early end."""
    restored: Best | None = None
    """The best whose weights were loaded into the model."""
    save_error: CheckpointError | None = None
    """The error of the save at the end of a run that has otherwise succeeded."""
    could_save: bool = False
    """Whether `on_error="save"` would have saved the lost state at the end."""
    earlier: dict[str, Any] | None = None
    """The end of the stage in an earlier session, read from the checkpoint of a later stage."""
    lacks_weights: bool = False
    """Whether the weights of that end are lost: the model holds its initial weights."""


@dataclass(slots=True)
class StageRecord:
    """The record of one stage, from its start to the start of the next one.

    If a `fit` is refused before its first update, the record of the stage before it is restored.
    """

    # Carried over from stage to stage.
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())
    """The id of the run, in its checkpoints and in experiment trackers."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """The end of each finished stage, as plain data for checkpoints."""
    warns: bool = True
    """Whether to warn of mistakes in the first batch. False in the trials of a tool, which run many first batches."""
    checked_metrics: set[str] = field(default_factory=set)
    """Metrics whose first batch was checked for a count instead of a mean."""

    # The state of the stage.
    is_under_way: bool = False
    """Whether its `fit` has not returned yet."""
    has_begun: bool = False
    """Whether `on_fit_start` was called: from then on it counts as a stage."""
    failed: bool = False
    """Whether it has not succeeded: True from its begin to a normal end. A resume continues a failed stage."""
    follows_failure: bool = False
    """Whether the stage before it failed."""
    caller: str = ""
    """The line of user code that called `fit(epochs=1)`; "-" after the header has named such a loop."""
    notes: tuple[str, ...] = ()
    """Lines for its header."""

    # For readers outside of the stage, and for the next stage.
    path: UpdatePath = field(default_factory=UpdatePath)
    evaluation: EvaluationRecord = field(default_factory=EvaluationRecord)
    outcome: Outcome = field(default_factory=Outcome)
    schedules: tuple[Any, ...] = ()
    """Its bound schedules; set when it is over."""
    weights: Any = None
    """Its `EvaluationWeights`; None before its loop."""

    def next_stage(self) -> StageRecord:
        """Return the record of the next `fit`."""
        carried = {name: getattr(self, name) for name in ("run_id", "warns", "checked_metrics")}
        return StageRecord(**carried, stages=list(self.stages), is_under_way=True, follows_failure=self.failed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageRecord:
        """Return a copy, for the copy of a trainer. TypeError if it refers to averaged weights or schedules."""
        if self.schedules or (self.weights is not None and self.weights.average is not None):
            what = "copy.deepcopy of a Trainer that has trained with a schedule or an average"
            fix = "copy.deepcopy(trainer.model), and a Trainer of its own for the copy"
            raise TypeError(message(what, want="a Trainer as it was before its first fit", fix=fix))
        names = [field.name for field in fields(self) if field.name != "run_id" or self.has_begun]
        return StageRecord(**{name: copy.deepcopy(getattr(self, name), memo) for name in names})


class NotRunning:
    """Placeholder of the run outside of `fit`: every attribute raises TrainwrightError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look these up
            raise AttributeError(name)
        raise TrainwrightError(message("this works only while fit() is running", want="a call from a hook or a step"))


NOT_RUNNING: Any = NotRunning()
