"""Hands an exception that comes out of a step to those who know its causes; they are imported when there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.core.errors import NOTE, StepError, TrainwrightError
from trainwright.diagnostics.frames import MISSING, Site, find_site, shown, title
from trainwright.diagnostics.loss_rules import loss_name
from trainwright.diagnostics.rules import Cause, cause_of, own_backward


def explain(error: BaseException, owner: Any) -> None:
    """Add one note to an exception of a training, validation or predict step; type, message and traceback stay.

    Errors of this library, interrupts, and errors that carry a note already are left alone.
    """
    if isinstance(error, Exception):
        add(error, owner)


_IN_VALIDATION = """\
  why      without a validation_step, validation runs training_step, with the model in eval mode
  fix      def validation_step(self, batch): return StepOutput(None, self.model(batch[0]), batch[1])"""


def add(error: Exception, owner: Any) -> None:
    """Add one note to an exception of a training, validation or predict step; type, message and traceback stay.

    Errors of this library, interrupts, and errors that carry a note already are left alone.
    """
    if isinstance(error, StepError):
        _name_the_step(error, owner)
    if isinstance(error, TrainwrightError):
        return
    if any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
        return
    try:
        site = find_site(error, owner)
        if site is not None:
            error.add_note(_note(site))
    except Exception as another:  # a step may hold any object; nothing that it does may replace the user's error
        error.add_note(f"{NOTE}what the failed step held cannot be shown: {type(another).__name__}: {another}")


def _name_the_step(error: StepError, owner: Any) -> None:
    """Say which step of the user's own returned what is no loss, and where it is written."""
    called, trace = set(), error.__traceback__
    while trace is not None:
        called.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    own = {"validation_step": owner.hooks.validates_itself, "training_step": owner.hooks.steps_itself}
    names = ["training_step"] if "compute_gradients" in called else ["validation_step", "training_step"]
    name = next((name for name in names if own[name]), None)
    if name is None or ("weigh" not in called and "note" not in called) or hasattr(error, "__notes__"):
        return
    code = getattr(type(owner), name).__code__
    note = f"{NOTE}{type(owner).__name__}.{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    backward = own_backward(owner) if name == "training_step" else None
    if backward is not None:
        note = "\n".join([note, *_labelled(backward)])
    elif name != names[0] and not str(error).startswith("a step returned None"):
        note = f"{note}\n{_IN_VALIDATION}"
    error.add_note(note)


def _note(site: Site) -> str:
    lines = [f"{NOTE}{_failed(site)} failed on {site.place}"]
    entries = {"batch": site.batch, "output": site.output}
    lines += [f"  {name:<9}{shown(value)}" for name, value in entries.items() if value is not MISSING]
    found = cause_of(site)
    if found is not None:
        lines += _labelled(found)
    return "\n".join(lines)


def _labelled(found: Cause) -> list[str]:
    return [f"  {label:<9}{text}" for label, text in zip(("why", "fix"), found, strict=True)]


def _failed(site: Site) -> str:
    """What failed, by the name that the user knows it by."""
    metric = _metric(site)
    if metric:
        return f"metric {metric!r}"
    if site.in_loss:
        return loss_name(site)
    layer = site.layer
    if layer is not None:
        name, module, _ = layer
        return title(name, module) + (f" of {type(site.owner.model).__name__}" if name else "")
    if site.in_backward:
        return "backward()"
    step = site.step
    return f"{type(site.owner).__name__}.{'training_step' if step is None else step.f_code.co_name}"


def _metric(site: Site) -> str:
    """The name of the metric that was taking in a batch."""
    name = site.local("name", function="_update", module="trainwright.metrics.metrics")
    return "" if name is MISSING else str(name)
