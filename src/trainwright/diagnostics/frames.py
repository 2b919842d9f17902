"""Reads from the frames of a traceback what a failed step was working on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainwright.update.window import Window

STEPS = ("training_step", "validation_step", "predict_step")
MOST_ITEMS, DEEPEST = 4, 3
"""How much of a nested batch is shown."""


class Missing:
    """Stands for what no frame holds: None may be a value."""


MISSING = Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an exception came from: the loop, the batch in hand, and the frames from there inwards."""

    owner: Any
    error: BaseException
    role: str
    """"train", the name of an evaluation, "predict" or "report"."""
    place: str
    """The batch in words: "train batch 3 of epoch 1"."""
    batch: Any
    frames: tuple[FrameType, ...]
    """The frames inside the loop's, outermost first."""
    loop: FrameType

    @property
    def step(self) -> FrameType | None:
        """The innermost frame of a step, for one may call another; else that of an `update` of the user's own."""
        own = self.loop if self.loop.f_code.co_name == "update" else None
        return next((frame for frame in reversed(self.frames) if frame.f_code.co_name in STEPS), own)

    @property
    def steps_by_default(self) -> bool:
        """Whether it was the Trainer's own step, which splits batches and calls the model and the loss."""
        return self.step is None or module_of(self.step) == "trainwright.trainer"

    def local(self, *names: str, function: str = "", module: str = "") -> Any:
        """The innermost local variable of one of these names, in frames of that function and module; else MISSING."""
        for frame in reversed(self.frames):
            fits = function in ("", frame.f_code.co_name) and module_of(frame).startswith(module)
            for name in names if fits else ():
                if name in frame.f_locals:
                    return frame.f_locals[name]
        return MISSING

    @property
    def output(self) -> Any:
        """What the model gave, as far as a frame still holds it."""
        step = self.step
        given = MISSING if step is None else step.f_locals.get("output", MISSING)
        if given is not MISSING:
            return given
        passed = self.local("output", module="trainwright.")
        return self.local("input", module="torch.nn.functional") if passed is MISSING and self.in_loss else passed

    @property
    def in_loss(self) -> bool:
        """Whether a loss was being computed."""
        return self.calls_own_loss or self.torch_loss is not None

    @property
    def calls_own_loss(self) -> bool:
        """Whether it was the Trainer's loss, called by the default step or by one of the user's own."""
        loss, ours = self.owner.loss, ("trainwright.update.batches", "trainwright.update.losses")
        return loss is not None and any(
            frame.f_locals.get("self") is loss
            or (module_of(frame) in ours and frame.f_code.co_name in ("loss_of", "exact_loss_of", "summed", "total"))
            for frame in self.frames
        )

    @property
    def torch_loss(self) -> FrameType | None:
        """The frame of one of torch's loss functions, which has `input` and `target`."""
        for frame in self.frames:
            if module_of(frame) == "torch.nn.functional" and {"input", "target"} <= set(frame.f_code.co_varnames):
                return frame
        return None

    @property
    def layer(self) -> tuple[str, nn.Module, FrameType] | None:
        """The innermost module of the model that was being called: its name in the model, itself, its frame."""
        model = self.owner.model
        names = {id(module): name for name, module in model.named_modules()}
        for frame in reversed(self.frames):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names and frame.f_code.co_name != "_call_impl":
                return names[id(module)], module, frame
        return None

    @property
    def inputs(self) -> Any:
        """What the default step has passed to the model; else MISSING."""
        step = self.step
        return MISSING if step is None or not self.steps_by_default else step.f_locals.get("inputs", MISSING)

    @property
    def in_backward(self) -> bool:
        """Whether gradients were being computed."""
        return any(f.f_code.co_name == "backward" and module_of(f).startswith("torch.") for f in self.frames)

    def own_lines(self) -> Iterator[tuple[FrameType, int]]:
        """The frames of the user's own code with the line that each was at, innermost first."""
        lines = {id(frame): line for frame, line in _lines(self.error.__traceback__)}
        for frame in reversed(self.frames):
            if not module_of(frame).startswith(("torch.", "trainwright.")) and not _installed(frame):
                yield frame, lines[id(frame)]


def find_site(error: BaseException, owner: Any) -> Site | None:
    """The innermost loop over batches that the exception passed, or None where it came from no batch."""
    frames = tuple(frame for frame, _ in _lines(error.__traceback__))
    for index in range(len(frames) - 1, -1, -1):
        frame, inner = frames[index], frames[index + 1 :]
        role = _role(frame)
        if role and inner and not _fetches(inner[0]):
            batch, place = _in_hand(frame, inner, owner=owner, role=role)
            return Site(owner=owner, error=error, role=role, place=place, batch=batch, frames=inner, loop=frame)
    return None


def module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in a nested batch."""
    if isinstance(value, Tensor):
        yield value
    elif depth < DEEPEST and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item, depth + 1)
    elif depth < DEEPEST and isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item, depth + 1)


def shown(value: Any, depth: int = 0) -> str:
    """Shapes, dtypes and devices of a nested batch, with its many items left out: never a value of it."""
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
    """A module by its type, and by its name in the model where it is not the model itself."""
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's type without torch's prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def place_of_fix(site: Site) -> str:
    """The method in which a batch is best changed: the user's own step, else `split`."""
    step = site.step
    if step is None or site.steps_by_default:
        return "split(self, batch)"
    return f"{step.f_code.co_name}(self, {'window' if step.f_code.co_name == 'update' else 'batch'})"


def _lines(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback with the line that each was at, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _installed(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or "site-packages" in name or "/lib/python" in name


def _listed(items: list[str], size: int) -> str:
    return ", ".join(items) + (f", and {size - len(items)} more" if size > len(items) else "")


def _role(frame: FrameType) -> str:
    """What a frame loops over, where it is one of the loops over batches, or an `update` of the user's own."""
    name, module = frame.f_code.co_name, module_of(frame)
    if module == "trainwright.trainer" and name == "compute_gradients":
        return "train" if isinstance(_window(frame), Window) else ""  # none in a frame that was cleared
    if (module, name) in (
        ("trainwright.evaluation.passes", "evaluate"),
        ("trainwright.evaluation.predictions", "predict"),
    ):
        return str(frame.f_locals.get("name", "predict"))
    if module == "trainwright.evaluation.reports" and name == "_compared":
        return "report"
    own = name == "update" and not module.startswith(("trainwright.", "torch."))
    return "train" if own and isinstance(_window(frame), Window) else ""


def _window(frame: FrameType) -> Any:
    return next((value for value in frame.f_locals.values() if isinstance(value, Window)), None)


def _fetches(frame: FrameType) -> bool:
    """Whether a loop's next frame fetches a batch."""
    readers = (
        "trainwright.data",
        "torch.utils.data",
        "trainwright.evaluation.predictions",
        "trainwright.fit.per_rank_state",
    )
    return module_of(frame).startswith(readers)


def _in_hand(loop: FrameType, inner: tuple[FrameType, ...], *, owner: Any, role: str) -> tuple[Any, str]:
    """The batch in hand, as the step got it, and where it stands."""
    if role != "train":
        step = next((frame for frame in inner if frame.f_code.co_name in STEPS), None)  # with the batch as moved
        made = loop.f_locals.get("outputs", loop.f_locals.get("pairs", ()))
        done = loop.f_locals.get("seen", len(made))
        batch = loop.f_locals.get("batch", MISSING) if step is None else _first_argument(step)
        return batch, f"{role} batch {done + 1}"
    counters, window = owner.counters, _window(loop)
    epoch = f"of epoch {counters.earlier_epochs + counters.epoch + 1}"
    batch = loop.f_locals.get("batch", MISSING)
    if loop.f_code.co_name == "update" and len(window) > 1:
        return batch, f"update {counters.updates + 1} {epoch}"
    if loop.f_code.co_name == "update":
        position, batch = 0, window[0] if batch is MISSING else batch
    else:  # a micro-batch is counted when its loss is weighed
        position = window.position + (not _comes_after_the_step(inner[0]))
    return batch, f"train batch {counters.batch + position + 1} {epoch}"


def _comes_after_the_step(frame: FrameType) -> bool:
    ours = module_of(frame).startswith("trainwright.") and frame.f_code.co_name != "training_step"
    return ours or (module_of(frame).startswith("torch.") and frame.f_code.co_name == "backward")


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[1], MISSING) if code.co_argcount > 1 else MISSING
