"""Finds the origin of a non-finite loss or gradient: the batch, a weight, or the forward or backward of a module.

Imported after a failed update. The model is in its state before the update. The search repeats one forward, and for a
finite loss one backward, under hooks, and restores everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.core.records import StepOutput
from trainwright.core.rng import rng_preserved
from trainwright.core.trees import copy_tree, leaves_of, tensors_in
from trainwright.diagnostics.frames import title
from trainwright.modules import modes
from trainwright.modules.dtensors import is_sharded
from trainwright.update.batches import split as default_split
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.losses import read_step_loss
from trainwright.update.nonfinite_policy import NonFiniteOrigin
from trainwright.update.snapshot import Buffers, Snapshot
from trainwright.update.trainer_like import networks_of

if TYPE_CHECKING:
    from trainwright.fit.run import Run

_MOST = 5
"""Maximum number of listed rows, tensors or names."""
_DATA = "correct these rows in the data, or leave them out"
_RATE = "a lower learning rate, or clip=1.0, where the weights have grown; else other initial weights"
_LINE = "anomaly() names the line"


def find_origin(run: Run) -> NonFiniteOrigin:
    """Return the origin of the non-finite numbers of the current update, as far as found. The run does not change."""
    window, trainer = run.tracker.window, run.trainer
    if window is None:
        return NonFiniteOrigin()
    lines: list[str] = []
    fix = ""
    with rng_preserved():
        for position, batch in enumerate(window.batches):
            found = _in_batch(batch, named=trainer._hooks.split is default_split)
            if not found and window.mover is not None:
                moved = _in_batch(window[position], named=False)
                found = [f"{line}, after to_device" for line in moved]
            if found:
                lines, fix = [f"{_place(run, position)}: {line}" for line in found], _DATA
                break
    weights = _in_weights(trainer)
    if weights:
        return NonFiniteOrigin((*lines, *weights), fix or _RATE)
    # An overridden method may compute anything. A step that makes its own data would make other data now.
    makes_data = any(batch is None for batch in window.batches)
    own = makes_data or trainer._hooks.has_custom_update or trainer._hooks.overrides_compute_gradients
    several = trainer.world.size > 1 or is_sharded(*trainer.model.parameters())  # forwards may be collectives
    missing = any(" NaN" in line for line in lines)  # inf may be intended, as in an attention mask
    if own or several or missing:
        return NonFiniteOrigin(tuple(lines), fix)
    searched = _ModuleSearch(run, looks_at_inputs=not lines).run()
    return NonFiniteOrigin((*lines, *searched.lines), fix or searched.fix, by_loss=searched.by_loss and not lines)


def _place(run: Run, position: int) -> str:
    counters = run.counters
    return f"train batch {counters.batch + position + 1} of epoch {counters.earlier_epochs + counters.epoch + 1}"


def _in_batch(batch: Any, *, named: bool) -> list[str]:
    """Return a line for each non-finite tensor of a batch: the number of elements, and the rows."""
    target = default_split(batch)[1] if named and isinstance(batch, Mapping | tuple | list | Tensor) else None
    found = []
    for name, tensor in leaves_of(batch, "batch"):
        if isinstance(tensor, Tensor) and (bad := _counted(tensor)) is not None:
            kind = "" if not named else "target " if tensor is target else "input "
            found.append(f"{kind}{name} has {bad}{_rows(tensor)}")
    return found[:_MOST]


def _counted(*tensors: Tensor) -> str | None:
    """Return the numbers of NaN and infinite elements as text; None if all are finite."""
    nans = infinite = total = 0
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            total += tensor.numel()
            nan = torch.isnan(tensor.detach())
            nans += int(nan.sum())
            infinite += int((~torch.isfinite(tensor.detach()) & ~nan).sum())
    if not nans and not infinite:
        return None
    kinds = [f"{nans} NaN"] * (nans > 0) + [f"{infinite} inf"] * (infinite > 0)
    return f"{' and '.join(kinds)} of {total} elements"


def _rows(tensor: Tensor) -> str:
    """Return the rows of a tensor with non-finite elements, as text."""
    if tensor.ndim < 1 or len(tensor) < 2:
        return ""
    bad = (~torch.isfinite(tensor.detach())).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    if len(bad) == len(tensor):
        return f", in all {len(tensor)} rows"
    more = f" and {len(bad) - _MOST} more" if len(bad) > _MOST else ""
    return f", in row{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:_MOST]))}{more} of {len(tensor)}"


def _in_weights(trainer: Any) -> list[str]:
    """Return a line for each non-finite weight, and for each buffer with NaN. inf in a buffer may be intended."""
    found = []
    for root in networks_of(trainer):
        for name, parameter in root.named_parameters():
            if (bad := _counted(parameter)) is not None:
                found.append(f"the weight {name!r} of {type(root).__name__} had {bad} before this update")
        for name, buffer in root.named_buffers():
            if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
                found.append(f"the buffer {name!r} of {type(root).__name__} has {_counted(buffer)}")
    return found[:_MOST]


class _ModuleSearch:
    """Repeats forward and backward of a window under hooks on the inputs and outputs of each module."""

    def __init__(self, run: Run, *, looks_at_inputs: bool) -> None:
        self._run, self._trainer = run, run.trainer
        self._looks_at_inputs = looks_at_inputs
        self._forward = ""
        """The first non-finite place of the forward; empty if none."""
        self._backward: tuple[str, int, str] | None = None
        """The first non-finite place of the backward: ("in" or "out", id of the tensor, name of the module)."""
        self._open: list[str] = []
        """Modules with a running forward, outermost first."""
        self._last = ""
        """The module that finished last."""
        self._seen: list[Tensor] = []
        """Inputs and outputs of modules; alive as long as their ids are compared."""

    def run(self) -> NonFiniteOrigin:
        """Return the origin. An error of user code during the search ends it."""
        try:
            with self._aside():
                return self._searched()
        except Exception as error:  # of user code, which may count its calls: the first error is reported
            return NonFiniteOrigin((f"a second forward, to find the module, failed with {type(error).__name__}",))

    def _searched(self) -> NonFiniteOrigin:
        run, trainer = self._run, self._trainer
        window = run.tracker.window
        assert window is not None
        losses = []
        for position, batch in enumerate(window.batches):
            trainer._tracker.batch = batch
            with run.autocast:
                returned = trainer.training_step(window[position])
            where = f" ({_place(run, position)})" if len(window.batches) > 1 else ""
            if self._forward:
                return NonFiniteOrigin((f"forward: {self._forward}{where}",), _fix_of_forward(self._forward))
            step_loss = read_step_loss(returned.loss if type(returned) is StepOutput else returned)
            if not bool(torch.isfinite(step_loss.loss.detach()).all()):
                line = f"forward: the outputs of all modules are finite; the loss that was made of them is not{where}"
                fix = "look at the targets, and at what the loss divides by or takes the logarithm of"
                return NonFiniteOrigin((line,), fix, by_loss=True)
            losses.append(step_loss.loss)
        return self._after_backward(losses)

    def _after_backward(self, losses: list[Tensor]) -> NonFiniteOrigin:
        run = self._run
        for loss in losses:
            torch.autograd.backward((loss,), (run.tracker.grad_tensor(loss, 1.0),))
        if self._backward is not None:
            kind, _, name = self._backward
            if kind == "in":
                line = f"backward: {name} made the first gradient that is not finite, from a finite one"
            else:
                line = f"backward: the gradient that reaches the output of {name} is the first that is not finite: "
                line += "a later operation produced it"
            fix = f"a finite output can have an infinite slope: sqrt or norm at 0, division, pow, where; {_LINE}"
            return NonFiniteOrigin((line,), fix)
        model = self._trainer.model
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        bad = [f"{name!r} ({text})" for name, grad in grads.items() if (text := _counted(grad)) is not None]
        if bad:
            line = "backward: the gradients of all outputs are finite, those of weights are not: "
            fix = f"look at what these weights are multiplied by, and at what the step does with them; {_LINE}"
            return NonFiniteOrigin((line + ", ".join(bad[:_MOST]),), fix)
        return NonFiniteOrigin(
            ("a second forward and backward gave finite numbers: draws differ, or the norm overflows",)
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Restore, at the end, everything that a second forward and backward may change."""
        trainer = self._trainer
        roots = networks_of(trainer)
        state, tracker = trainer.state, trainer._tracker
        with ExitStack() as undo:
            undo.enter_context(Snapshot(Buffers(lambda: roots)))
            undo.enter_context(rng_preserved())
            undo.enter_context(modes.untouched(*roots))
            if "torch._dynamo" in sys.modules:  # compiled modules run hooks in eager mode alone
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.callback(setattr, trainer, "state", state)
            undo.callback(setattr, trainer, "_tracker", tracker)
            trainer.state = copy_tree(state)
            trainer._tracker = LossTracker(None, trainer._hooks)
            for root in roots:
                for name, module in root.named_modules():
                    if isinstance(module, torch.jit.ScriptModule):
                        continue  # it does not support Python hooks
                    shown = title(name, module) if root is trainer.model else title("", module)
                    before = module.register_forward_pre_hook(
                        partial(self._enter, shown), with_kwargs=True, prepend=True
                    )
                    undo.callback(before.remove)
                    undo.callback(module.register_forward_hook(partial(self._leave, shown)).remove)
            with torch.enable_grad():
                yield

    def _enter(self, name: str, module: nn.Module, *given: Any) -> None:
        tensors = list(tensors_in(given))
        if self._looks_at_inputs and not self._forward and (bad := _counted(*tensors)) is not None:
            inside = f" in the forward of {self._open[-1]}" if self._open else " before the model"
            after = f", after {self._last}" if self._last else ""
            self._forward = f"the input of {name} is the first that is not finite ({bad}): computed{inside}{after}"
        self._open.append(name)
        self._hook(tensors, "in", name)

    def _leave(self, name: str, module: nn.Module, *given: Any) -> None:
        self._open.pop()
        self._last = name
        tensors = list(tensors_in(given[-1]))  # the output follows the inputs
        if not self._forward and (bad := _counted(*tensors)) is not None:
            self._forward = f"{name} gave the first output that is not finite: {bad}"
        self._hook(tensors, "out", name)

    def _hook(self, tensors: list[Tensor], kind: str, name: str) -> None:
        """Register checks of the gradients of a module's inputs or outputs."""
        for tensor in tensors:
            if tensor.requires_grad:
                self._seen.append(tensor)
                tensor.register_hook(self._looking(kind, id(tensor), name))

    def _looking(self, kind: str, key: int, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            first = self._backward
            # A tensor leaves one module and enters others. Its gradient comes from the innermost one that it enters.
            replaces = first is not None and first[1] == key and kind == "in"
            if (first is None or replaces) and _counted(gradient) is not None:
                self._backward = (kind, key, name)

        return look


def _fix_of_forward(found: str) -> str:
    if found.startswith("the input of"):
        return "look at what is computed there: log, sqrt, division or exp of what may be 0 or large"
    return "look at what this module computes of its input; a lower learning rate where its weights have grown"
