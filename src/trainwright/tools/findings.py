"""What is wrong, or costs without need, in a model, a step or a loader: found by looking on for a few updates."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.errors import StepError
from trainwright.data.sources import takes_batch_size
from trainwright.tools import findings_code, findings_data, findings_model
from trainwright.tools.finding import Finding, silent
from trainwright.tools.trial import ready
from trainwright.tools.watching import Recorder, Recording, noting_gradients
from trainwright.trainer import Trainer
from trainwright.update.window import find_rows

LOOKED_AT = 3
"""Updates that are looked at, where the batches are enough for them."""


def findings(
    trainer: Trainer[Any], batches: Sequence[Any], *, train: Any = None, val: Any = None, batch_size: int | None = None
) -> list[Finding]:
    """Return what is found in a few updates on ready host batches, one evaluation, and a few rows of the loader.

    Up to three updates are made on `batches`, and one batch is evaluated: of `val` where there is one. `train` are the
    data themselves, of which a few rows are fetched where they are a map-style data set, a DataLoader or
    `batches(...)` of one; streams are not read. Call it inside of `traceless(trainer)`: it trains. An error of the
    step itself is raised, as `fit` would, but for a loss that reaches no weight, which is a finding.
    """
    seen, updates, found = watched(trainer, batches)
    if found:
        return [*found, *findings_code.loader_findings(train)]
    found = [*findings_model.of_training(trainer, seen, updates=updates)]
    found += findings_model.of_evaluation(evaluated(trainer, batches, val, batch_size=batch_size))
    found += findings_model.of_anomaly(seen)
    found += findings_data.of_dtypes(trainer, batches)
    found += findings_data.of_inputs(seen, batches)
    found += findings_data.of_sizes(trainer, batches)
    found += [*findings_code.of_reads(seen, updates=updates), *findings_code.of_row_loops(seen)]
    return [*found, *findings_code.loader_findings(train)]


def watched(trainer: Trainer[Any], batches: Sequence[Any]) -> tuple[Recording, int, list[Finding]]:
    """What is seen of up to three updates, their number, and a finding where the loss reaches no weight."""
    each = trainer.accumulate[0][1]
    updates = max(1, min(LOOKED_AT, len(batches) // each))
    used = [batches[index % len(batches)] for index in range((updates + 1) * each)]  # the epoch goes on after them
    twin = silent(trainer, metrics=_functions(trainer.metrics))
    counts = [find_rows(batch) or 0 for batch in used]
    watch = Recorder(trainer.model, [rows for rows in counts if rows >= findings_code.MANY_ROWS])
    watch.seen.rows = sum(counts[: updates * each])
    step = twin.training_step

    def noted(batch: Any) -> Any:
        returned = step(batch)
        if isinstance(returned, Mapping):
            watch.seen.constant.update(name for name, one in returned.items() if not _has_gradient(one))
        return returned

    if twin._hooks.steps_itself:
        vars(twin)["training_step"] = noted
    parameters = {f"{root}.{name}": one for root, name, one in findings_model.trained_by(trainer)}
    with _uncompiled(), noting_gradients(parameters, watch.seen.reached), watch:
        try:
            twin.fit(used, max_updates=updates)
        except (RuntimeError, StepError) as error:
            found = _reaches_nothing(error)
            if found is None:
                raise
            return watch.seen, updates, [found]
    return watch.seen, updates, []


def evaluated(
    trainer: Trainer[Any], batches: Sequence[Any], val: Any, *, batch_size: int | None = None
) -> Recording | None:
    """What is seen of one evaluated batch: of training, where no other is given and all steps are the default ones."""
    hooks = trainer._hooks
    own = hooks.steps_itself or hooks.validates_itself or hooks.evaluates_itself or hooks.updates_itself
    if val is None and own:
        return None
    watch = Recorder(trainer.model)
    twin = silent(trainer)
    one = batches[:1]
    if val is not None:
        one = ready(twin, _first_set(val), updates=1, batch_size=batch_size if _takes_size(val) else None)[:1]
    with _uncompiled(), watch:
        twin.evaluate(list(one))
    return watch.seen


def _reaches_nothing(error: Exception) -> Finding | None:
    text = str(error)
    if "does not require grad" not in text and "reaches no weight" not in text:
        return None
    notes = [line.strip() for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]
    parted = (line.partition(" ") for line in (*notes, *text.splitlines()))
    parted = (line.partition(" ") for line in (*notes, *text.splitlines()))
    told = {label: rest.strip() for label, _, rest in parted if rest}
    return Finding(
        "loss reaches no parameter",
        "the loss depends on no weight that is trained: " + text.splitlines()[0],
        "no update can be made: fit() raises this error",
        told.get("fix", "return the loss as it was computed, without detach(), item() or torch.no_grad() around it"),
        tuple(told[key] for key in ("where", "at") if key in told),
    )


def _uncompiled() -> AbstractContextManager[Any]:
    """What the user has compiled runs as it is: a graph shows nothing of its inside, and must not hold the watch."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _functions(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that keep nothing: one that sums up itself is the user's, and stays as it is."""
    return {name: one for name, one in metrics.items() if inspect.isroutine(one)}


def _has_gradient(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.requires_grad


def _first_set(val: Any) -> Any:
    """The first of several sets of validation data; a dict of columns is one set."""
    if isinstance(val, dict) and val and not all(isinstance(one, Tensor | np.ndarray) for one in val.values()):
        return next(iter(val.values()))
    return val


def _takes_size(val: Any) -> bool:
    return takes_batch_size(_first_set(val))
