"""One update as it was recorded: the memory that batches are copied to, and what the host does beside each replay."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.base.records import Count
from trainwright.run.heard import note_again, noted_apart
from trainwright.run.outcome import Outcome
from trainwright.runtime.device import change
from trainwright.runtime.graphs import RECORDERS
from trainwright.runtime.walking import tensors_in
from trainwright.slots.window import Window

if TYPE_CHECKING:
    from trainwright.run.behind import Behind
    from trainwright.run.run import Run

_PLAIN = (bool, int, float, str, bytes, type(None))


class Unfit(Exception):
    """An update takes something from the host that a recording would keep as it is."""


class Recorded:
    """A recording of the update of one window, whole or up to its gradients, and what it left on the host.

    What the recorded code notes, in the ledger, the outcome and the norms, are tensors that every replay writes anew;
    so they are noted again, without the code that did.
    """

    def __init__(self, run: Run, behind: Behind | None, window: Window, *, whole: bool) -> None:
        """`window`: of batches on the device, and with counts that a replay may differ in on it too.

        `behind`: what judges updates later, which whole ones need.
        """
        self._run, self._behind, self.whole = run, behind, whole
        self.replays = 0
        """How often it was replayed."""
        self._window = fixed(window, run.owner.device)
        self._inputs = _tensors_of(self._window)
        self._graph = RECORDERS[run.owner.device.type](run.owner.device)
        with apart(run, self._window) as noted, _unread(run):
            make = run.owner.update if whole else run.owner.compute_gradients
            with self._graph.recording():
                loss = make(self._window)
                self._together = behind.count(noted.entries) if whole and behind is not None else None
            self._noted = noted
            self._outcome, self._factor = run.outcome, run.factor
            self._norms = [stepper.norm for stepper in run.steppers.all.steppers]
            self._flag = None if behind is None else behind.flag
        self._loss = loss.detach()
        self._gradients = [(parameter, parameter.grad) for parameter in run.gradients.parameters]
        _check_noted(noted.entries, run.owner.device)

    def attach(self) -> None:
        """Have the gradients be those that a replay writes."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def detach(self) -> None:
        """Have gradients that a replay has written lie elsewhere."""
        for parameter, gradient in self._gradients:
            if parameter.grad is gradient and gradient is not None:
                parameter.grad = gradient.clone()

    def replay(self, window: Window) -> Tensor:
        """Make the update of `window`, whose gradients are attached; returns its loss."""
        run = self._run
        torch._foreach_copy_(self._inputs, _tensors_of(window))
        self._graph.replay()
        self.replays += 1
        window.begun, window.position = True, len(window.batches) - 1
        note_again(run.ledger, self._noted)
        run.outcome, run.factor = copy.copy(self._outcome), self._factor
        for stepper, norm in zip(run.steppers.all.steppers, self._norms, strict=True):
            stepper.norm = norm
        if not self.whole:
            run.owner.apply_gradients()
        elif self._behind is not None:
            self._behind.flag = self._flag
            self._behind.recorded(self._together, self._noted.entries)
        return self._loss


def spec_of(value: Any) -> Any:
    """What a recording depends on of a batch: its structure, the form of its tensors, all else; Unfit for objects."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise Unfit("a batch holds a sparse or nested tensor")
        return value.shape, value.dtype, value.device, value.stride()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return type(value), *((key, spec_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(spec_of, value)
    raise Unfit(f"a batch holds a {type(value).__name__}")


def on_device(window: Window, device: torch.device) -> Window:
    """The window with its batches moved; counts that are not its rows are tensors, so that they may differ."""
    moved = list(window)
    counts: list[Count] | None = window.counts
    if counts is not None and (any(isinstance(count, Tensor) for count in counts) or list(counts) != window.rows):
        counts = [_as_tensor(count, device) for count in counts]
    return Window(moved, window.rows, counts)


def fixed(window: Window, device: torch.device) -> Window:
    """The window in memory of its own."""
    batches = [change(batch, device, torch.clone) for batch in window.batches]
    counts: list[Count] | None = None if window.counts is None else change(window.counts, device, torch.clone)
    return Window(batches, window.rows, counts)


@contextmanager
def apart(run: Run, window: Window) -> Iterator[Any]:
    """Have an update of `window` leave nothing on the host but what is yielded: what it has noted."""
    kept = run.outcome, run.factor, run._unjudged, [stepper.norm for stepper in run.steppers.all.steppers]
    run.outcome = Outcome()
    try:
        with noted_apart(run.ledger, window) as noted:
            yield noted
    finally:
        run.outcome, run.factor, run._unjudged, norms = kept
        for stepper, norm in zip(run.steppers.all.steppers, norms, strict=True):
            stepper.norm = norm


@contextmanager
def _unread(run: Run) -> Iterator[None]:
    """Have code that asks inside how the run goes be found unfit: a replay would not ask again."""
    owner, step = run.owner, run.step
    asked: list[str] = []

    def watched(batch: Any) -> Any:
        with ExitStack() as hidden:
            hidden.enter_context(_hidden(owner, "history", _Unreadable("`self.history`", asked)))
            unreadable = _Unreadable("the settings of the optimizer", asked)
            for optimizer in owner.optimizers.values():
                hidden.enter_context(_hidden(optimizer, "param_groups", unreadable))
            return step(batch)

    run.step = watched
    try:
        with _hidden(owner, "counters", _Unreadable("`self.progress`", asked)):
            yield
    finally:
        run.step = step
    if asked:  # by code that has caught the error
        raise Unfit(asked[0])


@contextmanager
def _hidden(owner: Any, name: str, unreadable: _Unreadable) -> Iterator[None]:
    held = vars(owner)[name]
    setattr(owner, name, unreadable)
    try:
        yield
    finally:
        setattr(owner, name, held)


class _Unreadable:
    def __init__(self, what: str, asked: list[str]) -> None:
        self.__dict__["_told"] = f"the step reads {what}", asked

    def _refuse(self, *_: Any) -> Any:
        why, asked = self.__dict__["_told"]
        asked.append(why)
        raise Unfit(why)

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __contains__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _check_noted(entries: Sequence[tuple[str, Any, Any, bool]], device: torch.device) -> None:
    for name, value, _, _ in entries:
        if not isinstance(value, Tensor) or value.device.type != device.type:
            raise Unfit(f"log({name!r}, ...) of a number that the host has computed")


def _as_tensor(count: Any, device: torch.device) -> Tensor:
    value = torch.as_tensor(count)
    return (value.pin_memory() if device.type == "cuda" and value.is_cpu else value).to(device, non_blocking=True)


def _tensors_of(window: Window) -> list[Tensor]:
    counts = [count for count in window.counts or () if isinstance(count, Tensor)]
    return [*(tensor.detach() for tensor in tensors_in(window.batches)), *counts]
