"""Adds a note to the exception of a step: the batch, its shapes, and, if a rule applies, the cause and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import NOTE, StepError, TrainwrightError, notes_of, user_line

if TYPE_CHECKING:
    from trainwright.diagnostics.frames import Failure

_IN_VALIDATION = (
    "without a validation_step, validation runs training_step, with the model in eval mode",
    "def validation_step(self, batch): return StepOutput(None, self.model(batch[0]), batch[1])",
)


def explain(error: BaseException, trainer: Any) -> None:
    """Add one note to an exception of a training, validation or predict step. Type, message and traceback remain.

    Errors of this library, interrupts, and errors with such a note are unchanged.
    """
    if not isinstance(error, Exception):
        return
    if isinstance(error, StepError):
        _name_the_step(error, trainer)
    if isinstance(error, TrainwrightError) or _has_note(error):
        return
    try:
        from trainwright.diagnostics.frames import read_failure

        failure = read_failure(error, trainer)
        if failure is not None:
            error.add_note(_note(failure))
    except Exception as another:  # of an object in the step: it must not replace the user's error
        error.add_note(f"{NOTE}the values of the failed step cannot be shown: {type(another).__name__}: {another}")


def _has_note(error: BaseException) -> bool:
    """Return whether the error was explained already. Python sets `__notes__` with the first note."""
    return any(note.startswith(NOTE) for note in notes_of(error))


def _note(failure: Failure) -> str:
    from trainwright.diagnostics.frames import MISSING, shown
    from trainwright.diagnostics.rules import explanation_of

    lines = [f"{NOTE}{_failed(failure)} failed on {failure.place}"]
    entries = {"batch": failure.batch, "output": failure.output}
    lines += [f"  {name:<9}{shown(value)}" for name, value in entries.items() if value is not MISSING]
    found = explanation_of(failure)
    if found is not None:
        lines.append(_labeled(*found))
    if place := _place(failure):
        lines.append(f"  where    {place}")
    return "\n".join(lines)


def _place(failure: Failure) -> str:
    """Return the failed line of user code; else the step of the failed backward, or the call of `fit`."""
    if failure.user_place:
        return failure.user_place
    if failure.in_backward and failure.trainer._hooks.overrides_training_step:
        return _defined(failure.trainer, "training_step")
    return user_line()


def _defined(trainer: Any, name: str) -> str:
    """Return the name of a custom step with the line of its definition."""
    step = f"{type(trainer).__name__}.{name}"
    code = getattr(getattr(type(trainer), name), "__code__", None)
    return step if code is None else f"{step} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _failed(failure: Failure) -> str:
    """Return the failed metric, loss, module or step, named as in the user's code."""
    if failure.metric:
        return f"metric {failure.metric!r}"
    if failure.loss is not None:
        return failure.loss.name
    if failure.layer is not None:
        return failure.layer.title + (f" of {type(failure.trainer.model).__name__}" if failure.layer.name else "")
    if failure.in_backward:
        return "backward()"
    return f"{type(failure.trainer).__name__}.{failure.step or 'training_step'}"


def _name_the_step(error: StepError, trainer: Any) -> None:
    """Add a note with the name of the step that returned no loss, and the line of its definition."""
    called, trace = set(), error.__traceback__
    while trace is not None:
        called.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    own = {
        "validation_step": trainer._hooks.overrides_validation_step,
        "training_step": trainer._hooks.overrides_training_step,
    }
    names = ["training_step"] if "compute_gradients" in called else ["validation_step", "training_step"]
    name = next((name for name in names if own[name]), None)
    if name is None or called.isdisjoint({"record", "grad_tensor"}) or _has_note(error):
        return
    from trainwright.diagnostics.rules import explain_own_backward

    note = f"{NOTE}{_defined(trainer, name)}"
    found = explain_own_backward(trainer) if name == "training_step" else None
    if found is not None:
        note = f"{note}\n{_labeled(*found)}"
    elif name != names[0] and not str(error).startswith("a step returned None"):
        note = f"{note}\n{_labeled(*_IN_VALIDATION)}"
    error.add_note(note)


def _labeled(cause: str, fix: str) -> str:
    return f"  why      {cause}\n  fix      {fix}"
