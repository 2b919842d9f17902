"""Reads the frames of a traceback once into a `Failure`, the facts about the failed step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainwright.core.checks import name_of
from trainwright.update.window import Window, find_rows

STEPS = ("training_step", "validation_step", "predict_step")
MOST_ITEMS, DEEPEST = 4, 3
"""Maximum items and depth of a nested batch in a message."""


class Missing:
    """The type of `MISSING`, for values that no frame holds: None may be a value."""


MISSING = Missing()


@dataclass(frozen=True, slots=True)
class CalledLayer:
    """The innermost called module of the model."""

    name: str
    """Its name in the model; empty for the model itself."""
    module: nn.Module
    given: Tensor | None
    """Its input if that is a tensor with dimensions, else None."""

    @property
    def title(self) -> str:
        """Its type, and its name in the model if it has one."""
        return title(self.name, self.module)


@dataclass(frozen=True, slots=True)
class LossCall:
    """The failed call of a loss."""

    name: str
    """Its name in the user's code."""
    function: str = ""
    """The function of `torch.nn.functional` that it called; empty if none was reached."""
    output: Any = None
    target: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The facts about a failed step, for the rules."""

    trainer: Any
    """The Trainer."""
    error: BaseException
    text: str
    """The message of the error."""
    role: str
    """"train", the name of an evaluation, "predict" or "report"."""
    place: str
    """The batch in words, such as "train batch 3 of epoch 1"."""
    batch: Any
    """The batch as passed to the step, or MISSING."""
    rows: int
    """Number of rows of the batch; 0 if unknown."""
    frames: tuple[FrameType, ...]
    """The frames inside the loop over batches, outermost first."""
    step: str
    """The name of the step that raised, or "update"; else empty."""
    in_default_step: bool
    """Whether it is the default step, which splits batches and calls model and loss."""
    inputs: Any
    """The arguments that the default step passes to the model, or MISSING."""
    output: Any
    """The output of the model if a frame holds it, else MISSING."""
    returned: Any
    """The result of the step if it has returned, else None."""
    layer: CalledLayer | None
    loss: LossCall | None
    """The loss in progress, or None."""
    metric: str
    """The name of the metric in progress; else empty."""
    in_backward: bool
    user_frame: FrameType | None
    """The innermost frame of user code."""
    user_place: str
    """Its function, file and line."""

    @property
    def method(self) -> str:
        """The method in which to change a batch: the custom step, else `split`."""
        if self.in_default_step:
            return "split(self, batch)"
        return f"{self.step}(self, {'window' if self.step == 'update' else 'batch'})"


def read_failure(error: BaseException, trainer: Any) -> Failure | None:
    """Return the facts about a failed batch; None if the exception is not from a loop over batches."""
    lines = _lines(error.__traceback__)
    frames = tuple(frame for frame, _ in lines)
    for index in range(len(frames) - 1, -1, -1):
        loop, inner = frames[index], frames[index + 1 :]
        role = _role(loop)
        if role and inner and not _fetches(inner[0]):
            return _read(error, trainer, role=role, loop=loop, frames=inner, lines=lines)
    return None


def _read(
    error: BaseException,
    trainer: Any,
    *,
    role: str,
    loop: FrameType,
    frames: tuple[FrameType, ...],
    lines: list[tuple[FrameType, int]],
) -> Failure:
    batch, place = _batch(loop, frames, trainer=trainer, role=role)
    # One step may call another: the innermost counts, or a custom `update`.
    own_update = loop if loop.f_code.co_name == "update" else None
    step = next((frame for frame in reversed(frames) if frame.f_code.co_name in STEPS), own_update)
    in_default_step = step is None or module_of(step) == "trainwright.trainer"
    loss = _loss(frames, trainer)
    user = [(f, line) for f, line in lines if f in frames and _is_users(f)]
    metric = _local(frames, "metric", function="update", module="trainwright.metrics.metric_set")
    return Failure(
        trainer=trainer,
        error=error,
        text=str(error),
        role=role,
        place=place,
        batch=batch,
        rows=0 if batch is MISSING else find_rows(batch) or 0,
        frames=frames,
        step="" if step is None else step.f_code.co_name,
        in_default_step=in_default_step,
        inputs=step.f_locals.get("inputs", MISSING) if step is not None and in_default_step else MISSING,
        output=_output(frames, step, in_loss=loss is not None),
        returned=loop.f_locals.get("returned"),
        layer=_layer(frames, trainer.model),
        loss=loss,
        metric="" if metric is MISSING else metric.name,
        in_backward=any(f.f_code.co_name == "backward" and module_of(f).startswith("torch.") for f in frames),
        user_frame=user[-1][0] if user else None,
        user_place=_place_in_code(*user[-1]) if user else "",
    )


def module_of(frame: FrameType) -> str:
    """Return the name of the Python module of a frame."""
    return str(frame.f_globals.get("__name__", ""))


def shown(value: Any, depth: int = 0) -> str:
    """Return the structure of a nested batch as text: shapes, dtypes and devices of the first items, without values."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {dtype_name(value)} {value.device}"
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype} ndarray"
    if depth < DEEPEST and isinstance(value, Mapping):
        items = [f"{key!r}: {shown(item, depth + 1)}" for key, item in list(value.items())[:MOST_ITEMS]]
        return "{" + _listed(items, len(value)) + "}"
    if depth < DEEPEST and isinstance(value, list | tuple):
        items = [shown(item, depth + 1) for item in value[:MOST_ITEMS]]
        return ("[{}]" if isinstance(value, list) else "({})").format(_listed(items, len(value)))
    return type(value).__name__


def title(name: str, module: nn.Module) -> str:
    """Return the type of a module and, unless it is the model itself, its name in the model."""
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype without the prefix `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _listed(items: list[str], size: int) -> str:
    return ", ".join(items) + (f", and {size - len(items)} more" if size > len(items) else "")


def _lines(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return (frame, current line) of a traceback, outermost first."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


# The loop over batches, and the current batch. From here on, names of functions and local variables of this package are
# compared as text: rename them here too.


def _role(frame: FrameType) -> str:
    """Return the role of a frame that loops over batches, or is an overridden `update`; else an empty string."""
    name, module = frame.f_code.co_name, module_of(frame)
    if (module, name) == ("trainwright.trainer", "compute_gradients"):
        return "train" if isinstance(_window(frame), Window) else ""  # a cleared frame has no window
    if (module, name) in (
        ("trainwright.evaluation.passes", "evaluate"),
        ("trainwright.evaluation.predictions", "predict"),
    ):
        return str(frame.f_locals.get("name", "predict"))
    if (module, name) == ("trainwright.evaluation.reports", "_compared"):
        return "report"
    own = name == "update" and not module.startswith(("trainwright.", "torch."))
    return "train" if own and isinstance(_window(frame), Window) else ""


def _window(frame: FrameType) -> Any:
    return next((value for value in frame.f_locals.values() if isinstance(value, Window)), None)


def _fetches(frame: FrameType) -> bool:
    """Return whether a frame, called by a loop, fetches a batch."""
    readers = (
        "trainwright.data",
        "torch.utils.data",
        "trainwright.evaluation.predictions",
        "trainwright.update.per_rank_state",
    )
    return module_of(frame).startswith(readers)


def _batch(loop: FrameType, inner: tuple[FrameType, ...], *, trainer: Any, role: str) -> tuple[Any, str]:
    """Return the current batch, as passed to the step, and its position in words."""
    if role != "train":
        step = next((frame for frame in inner if frame.f_code.co_name in STEPS), None)  # holds the moved batch
        made = loop.f_locals.get("outputs", loop.f_locals.get("pairs", ()))
        done = loop.f_locals.get("seen", len(made))
        batch = loop.f_locals.get("batch", MISSING) if step is None else _first_argument(step)
        return batch, f"{role} batch {done + 1}"
    counters, window = trainer._counters, _window(loop)
    epoch = f"of epoch {counters.earlier_epochs + counters.epoch + 1}"
    batch = loop.f_locals.get("batch", MISSING)
    if loop.f_code.co_name == "update" and len(window) > 1:
        return batch, f"update {counters.updates + 1} {epoch}"
    if loop.f_code.co_name == "update":
        position, batch = 0, window[0] if batch is MISSING else batch
    else:  # a micro-batch is counted when its loss is weighted
        position = window.position + (not _is_weighed(inner))
    return batch, f"train batch {counters.batch + position + 1} {epoch}"


def _is_weighed(inner: tuple[FrameType, ...]) -> bool:
    """Return whether the tracker has weighted the loss of the current micro-batch."""
    first, called = inner[0], {frame.f_code.co_name for frame in inner}
    if module_of(first).startswith("torch."):
        return first.f_code.co_name == "backward"
    ours = module_of(first).startswith("trainwright.") and called.isdisjoint(STEPS)
    return ours and ("record" not in called or "_set_weight" in called)


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[1], MISSING) if code.co_argcount > 1 else MISSING


# The computation in progress: a layer, a loss, an output.


def _local(frames: tuple[FrameType, ...], name: str, *, module: str, function: str = "") -> Any:
    """Return the innermost local variable of a name in frames of a module and function, else MISSING."""
    for frame in reversed(frames):
        fits = function in ("", frame.f_code.co_name) and module_of(frame).startswith(module)
        if fits and name in frame.f_locals:
            return frame.f_locals[name]
    return MISSING


def _layer(frames: tuple[FrameType, ...], model: nn.Module) -> CalledLayer | None:
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names and frame.f_code.co_name != "_call_impl":
            given = frame.f_locals.get("input")
            return CalledLayer(names[id(module)], module, given if isinstance(given, Tensor) and given.ndim else None)
    return None


def _loss(frames: tuple[FrameType, ...], trainer: Any) -> LossCall | None:
    """Return the failed call of a loss: the Trainer's loss, or a torch loss called by the step."""
    loss, ours = trainer.loss, ("trainwright.update.batches", "trainwright.update.losses")
    functions = ("loss_of", "counted_loss_of", "exact_loss_of", "with_count", "evaluated")
    is_trainers = loss is not None and any(
        frame.f_locals.get("self") is loss or (module_of(frame) in ours and frame.f_code.co_name in functions)
        for frame in frames
    )
    of_torch = [
        frame
        for frame in frames
        if module_of(frame) == "torch.nn.functional" and {"input", "target"} <= set(frame.f_code.co_varnames)
    ]
    if not is_trainers and not of_torch:
        return None
    if not of_torch:
        return LossCall(name_of(loss))
    frame = of_torch[0]
    function, held = frame.f_code.co_name, frame.f_locals
    return LossCall(name_of(loss) if is_trainers else function, function, held["input"], held["target"])


def _output(frames: tuple[FrameType, ...], step: FrameType | None, *, in_loss: bool) -> Any:
    """Return the output of the model, as held by the step, a function of this package, or the loss."""
    if step is not None and "output" in step.f_locals:
        return step.f_locals["output"]
    passed = _local(frames, "output", module="trainwright.")
    return _local(frames, "input", module="torch.nn.functional") if passed is MISSING and in_loss else passed


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame runs user code."""
    file = frame.f_code.co_filename
    installed = file.startswith("<") or "site-packages" in file or "/lib/python" in file
    return not installed and not module_of(frame).startswith(("torch.", "trainwright."))


def _place_in_code(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{line})"
