"""Checks the inputs of torch's classification losses in the first update; refuses steps that only the loop may call.

Probabilities instead of logits train slowly and badly, without an error. Later updates are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, cast
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.core import torch_private
from trainwright.core.errors import StepError, message
from trainwright.core.trees import inside

_FORMS = ("View", "Reshape", "Permute", "Transpose", "TBackward", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Slice")
_OTHER_FORMS = ("Select", "Index", "Clamp", "Alias", "UnsafeView", "Expand", "Cat", "Stack", "MaskedSelect")
"""Autograd nodes of operations that move, cast or clamp values, and compute no new ones."""
_LINEAR = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Mv", "Linear", "NativeBatchNorm", "NativeLayerNorm")
"""Autograd nodes whose results are not probabilities, even if their values look like it."""


class LossMistake(NamedTuple):
    """A loss with the wrong kind of input, as the parts of a message."""

    what: str
    have: str
    want: str
    fix: str


class FirstBatch(TorchFunctionMode):
    """Checks the first call of each classification loss of torch between `open` and `close`."""

    def __init__(self, *, checks: bool) -> None:
        super().__init__()
        self._left = dict(_CHECKS) if checks else {}
        """The checks of losses without a call so far."""
        self.found: list[LossMistake] = []
        """The mistakes found."""
        self._is_open = False

    def open(self) -> None:
        """Start the checks; a second call is a no-op."""
        if self._left and not self._is_open:
            self._is_open, mode = True, cast(Any, self)  # torch's method has no types
            mode.__enter__()

    def close(self) -> None:
        """End the checks; a second call is a no-op."""
        if self._is_open:
            self._is_open, mode = False, cast(Any, self)
            mode.__exit__(None, None, None)

    def warn(self) -> None:
        """End the checks, and issue one warning per mistake."""
        self.close()
        for one in self.found:
            warn(message(one.what, have=one.have, want=one.want, fix=one.fix), stacklevel=5)  # the call of `fit`
        self.found = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and check the first call of each loss."""
        returned = func(*args, **(kwargs or {}))
        check = self._left.pop(func, None)
        output = args[0] if args else (kwargs or {}).get("input")
        if check is not None and isinstance(output, Tensor) and output.numel() and not output.is_meta:
            try:
                with torch.no_grad():
                    found = check(output, returned)
            except RuntimeError:  # a tensor whose values cannot be read, as under vmap
                found = None
            self.found += [] if found is None else [found]
        return returned


@contextmanager
def refusing_own_steps(trainer: Any) -> Iterator[None]:
    """Raise StepError before a `step` of the trainer's optimizers that its `training_step` calls, as a plain loop does.

    Only a `training_step` whose code calls `backward` and `step` is watched: other runs have no hook.
    """
    code = getattr(type(trainer).training_step, "__code__", None)
    handles: list[Any] = []
    if code is not None and {"backward", "step"} <= set(code.co_names):
        handles += [one.register_step_pre_hook(_refuse_own_step) for one in trainer.optimizers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_own_step(*_: Any) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "training_step":
        frame = frame.f_back
    if frame is not None:
        raise StepError(
            "training_step calls backward() and the optimizer's step() itself",
            want="the loss: the loop calls zero_grad(), backward() and step()",
            fix="return loss, and no backward() and step() before it",
        )


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether any module is compiled. The function mode would cause a second compilation."""
    return "torch._dynamo" in sys.modules and any(map(torch_private.is_compiled, inside(model)))


def _under_cross_entropy(output: Tensor, loss: Tensor) -> LossMistake | None:
    """Return the mistake of outputs that are probabilities."""
    made_by = _origin(output)
    if made_by.startswith(_LINEAR) or not _are_distributions(output, made_by):
        return None
    return LossMistake(
        "the outputs are probabilities, and cross entropy expects logits: it applies softmax itself",
        have=f"outputs {tuple(output.shape)} whose rows sum to 1, none negative",
        want="logits: the scores before the softmax",
        fix="leave the softmax out of the model; output.softmax(1) where probabilities are needed",
    )


def _are_distributions(output: Tensor, made_by: str) -> bool:
    """Return whether the rows are nonnegative and sum to 1, and not by chance."""
    dim = 1 if output.ndim > 1 else 0
    if output.shape[dim] < 2 or not output.is_floating_point():
        return False
    rows = output.detach().movedim(dim, -1).reshape(-1, output.shape[dim]).float()
    near = 1e-2 if output.dtype in (torch.float16, torch.bfloat16) else 1e-4
    if not bool((rows >= 0).all() & ((rows.sum(1) - 1).abs() < near).all()):
        return False
    # Without a softmax, a single row, or equal rows, may sum to 1 by chance.
    return made_by.startswith("Softmax") or (len(rows) > 1 and not bool((rows == rows[:1]).all()))


def _under_nll(output: Tensor, loss: Tensor) -> LossMistake | None:
    """Return the mistake of values that are not log-probabilities: only these give a negative loss."""
    made_by = _origin(output)
    if made_by.startswith("LogSoftmax"):
        return None
    positive = made_by.startswith((*_LINEAR, "Softmax")) and bool((output > 1e-3).any())
    if not positive and not bool((loss < -1e-4).any()):
        return None
    return LossMistake(
        "NLLLoss expects log-probabilities, but some outputs are above 0",
        have=f"outputs up to {float(output.max()):.3g}, and a loss of {float(loss.float().mean()):.3g}",
        want="outputs of log_softmax",
        fix="nn.CrossEntropyLoss() for scores; or output.log_softmax(1) at the end of the model",
    )


def _under_bce(output: Tensor, loss: Tensor) -> LossMistake | None:
    """Return the mistake of outputs that are probabilities."""
    made_by = _origin(output)
    if not made_by.startswith(("Sigmoid", "Hardsigmoid", "Softmax")) or not bool(((output >= 0) & (output <= 1)).all()):
        return None
    return LossMistake(
        "the outputs are probabilities, and BCEWithLogitsLoss expects logits: it applies sigmoid itself",
        have=f"outputs {tuple(output.shape)} from {float(output.min()):.3g} to {float(output.max()):.3g}",
        want="logits: the scores before the sigmoid",
        fix="leave the sigmoid out of the model; or nn.BCELoss()",
    )


def _origin(output: Tensor) -> str:
    """Return the autograd node that computed the values of a tensor; empty without a graph."""
    node: Any = output.grad_fn
    while node is not None:
        name = type(node).__name__
        if not name.startswith((*_FORMS, *_OTHER_FORMS)) or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return ""


_CHECKS: dict[Any, Callable[[Tensor, Tensor], LossMistake | None]] = {
    F.cross_entropy: _under_cross_entropy,
    F.nll_loss: _under_nll,
    F.binary_cross_entropy_with_logits: _under_bce,
}
"""Loss -> its check, a function of output and loss."""
