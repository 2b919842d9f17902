"""`StepLoss`, the return of a step as a loss with its count, and the torch losses whose counts are known."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.checks import name_of
from trainwright.core.errors import DataError, StepError
from trainwright.core.records import Count, MeanLoss, StepOutput, SumLoss
from trainwright.core.suggestions import RESERVED
from trainwright.core.torch_private import has_forward_hooks, nll_total_weight
from trainwright.update.window import one_for_zero

Loss = Callable[..., Any]

_NUMBERS = (int, float, np.number)


@dataclass(slots=True, eq=False)
class StepLoss:
    """The loss of a step in one form: a mean or a sum (`is_sum`), and its count if the step returned one."""

    loss: Tensor
    count: Count | None = None
    is_sum: bool = False
    named: Mapping[str, Tensor] | None = None
    weight: Count = 1.0
    """The weight in the window, without the loss scale."""

    @property
    def mean(self) -> Tensor:
        """The value to report; a sum with a count is divided by the count."""
        value = self.loss.detach()
        if not self.is_sum or self.count is None:
            return value
        return value / (one_for_zero(self.count) if isinstance(self.count, Tensor) else self.count)


def read_step_loss(returned: Any) -> StepLoss:
    """Return the `StepLoss` of the return of a step (inside its `StepOutput`, if any); StepError if it is no loss."""
    if isinstance(returned, Tensor):
        return StepLoss(_scalar(returned))
    if isinstance(returned, MeanLoss):
        return StepLoss(_scalar(returned.loss), _counted(returned.count, returned))
    if isinstance(returned, SumLoss):
        count = returned.count
        return StepLoss(_scalar(returned.total), None if count is None else _counted(count, returned), is_sum=True)
    if isinstance(returned, Mapping) and returned:
        return _named(returned)
    raise StepError(
        f"a step returned {_shown(returned)}",
        want="a loss tensor, MeanLoss(loss, count), SumLoss(total, count), StepOutput(loss, output, target) "
        "or a dict of named losses",
        fix="return loss",
        where=False,
    )


def no_target() -> DataError:
    """Return the error for a batch without a target for the loss."""
    return DataError(
        "a batch holds no target for the loss",
        want="(inputs, target), or a dict with 'target', 'targets', 'labels', 'label' or 'y'",
        fix="override split(self, batch) -> (inputs, target), or training_step(self, batch)",
        where=False,
    )


def fix_of_shapes(output: Tensor, target: Tensor, where: str = "split(self, batch)") -> str:
    """Return the code that gives output and target one shape, such as (N, 1) and (N)."""
    if output.ndim == target.ndim + 1 and output.shape[-1] == 1:
        return f"target.unsqueeze({target.ndim}) in {where}"
    if target.ndim == output.ndim + 1 and target.shape[-1] == 1:
        return f"target.squeeze({output.ndim}) in {where}"
    return f"a last layer of {math.prod(target.shape[1:])} outputs, or other targets from {where}"


def check_shapes(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise DataError for shapes that torch broadcasts to all pairs of rows: (N, 1) with (N) gives N * N numbers.

    Shapes with the same number of dimensions are allowed, as is a 0-dim target, which is the same for all rows.
    """
    if output.ndim == target.ndim or not target.ndim or output.numel() == target.numel() == 1:
        return
    raise DataError(
        f"{name_of(loss)} on an output {tuple(output.shape)} and a target {tuple(target.shape)}",
        have="shapes that torch broadcasts over one another, so that each row is compared with all others",
        want="an output and a target of one shape",
        fix=fix_of_shapes(output, target),
    )


class KnownLoss:
    """A torch loss whose count is known, with the same loss under other reductions.

    The count is torch's divisor for `reduction="mean"`: valid or weighted targets for cross entropy and NLL; positions
    (elements / classes) for targets that are probabilities; elements for all other losses.
    """

    def __init__(self, loss: Loss, kind: str, options: Mapping[str, Any], *, rebuilt: Callable[[str], Loss]) -> None:
        self.mean = loss
        self.reduction: str = options.get("reduction", "mean")
        self.each_element = kind == "elements"
        """Whether output and target are compared element by element."""
        self._options = options
        self._ignored: int = options.get("ignore_index", -100)
        self._weighted = options.get("weight") is not None
        self._sum, self._none = rebuilt("sum"), rebuilt("none")

    @property
    def _weight(self) -> Tensor | None:
        """The current class weights; those of a module may be replaced, or moved to another device."""
        given = self.mean.weight if isinstance(self.mean, nn.Module) else self._options["weight"]
        return cast("Tensor | None", given)

    def with_count(self, output: Tensor, target: Tensor, count: Count) -> StepLoss:
        """Return the loss of one of several micro-batches, with its count.

        With class weights, it is a sum: if all weights are 0, the gradient of the sum is 0, but that of torch's mean
        NaN.
        """
        if not self._weighted:
            return StepLoss(self.mean(output, target), count)
        output = output.float() if output.dtype in _HALVES else output  # in half precision, a sum may overflow
        return StepLoss(self._sum(output, target), count, is_sum=True)

    def evaluated(self, output: Tensor, target: Tensor) -> MeanLoss | SumLoss:
        """Return the loss of a batch of an evaluation with its count, as a sum without the rounding of a division."""
        if target is None:
            raise no_target()
        if self.each_element and output.shape != target.shape:
            check_shapes(self.mean, output, target)
            if self.reduction == "mean":  # torch broadcasts, with a warning
                return MeanLoss(self.mean(output, target), self.count(target))
        if output.dtype in _HALVES:  # in half precision, a sum over a batch may overflow
            output, target = output.float(), target.float() if target.is_floating_point() else target
        return SumLoss(self._sum(output, target), self.count(target) if self.reduction == "mean" else None)

    def count(self, target: Tensor) -> Count:
        """Return the count of a mean over `target`: an int, a float with class weights, or a tensor on its device."""
        if self.each_element:
            return target.numel()
        if target.is_floating_point():
            return target.numel() // int(target.shape[1 if target.ndim > 1 else 0])
        return count_targets(target, self._ignored, self._weight if self._weighted else None)

    def each_row(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one value per row, shape (rows,): the mean over the elements of the row."""
        values: Tensor = self._none(output, target)
        return values.flatten(1).mean(1) if values.ndim > 1 else values


def count_targets(target: Tensor, ignored: int, weight: Tensor | None = None) -> Count:
    """Return the divisor of torch's cross entropy: the number of targets not ignored, or the sum of their weights."""
    if weight is not None:
        return _sum_weights(target, ignored, weight.to(target.device))
    if not target.is_cpu:
        return torch.count_nonzero(target != ignored)
    if target.ndim == 1 and target.numel() <= _FEW:
        return target.numel() - target.tolist().count(ignored)
    return int(np.count_nonzero(target.numpy() != ignored))


def _sum_weights(target: Tensor, ignored: int, weight: Tensor) -> Count:
    valid = target != ignored
    total = torch.where(valid, weight[torch.where(valid, target, 0)].double(), 0.0).sum()
    return total if not target.is_cpu else float(total)


def known_loss(loss: Any) -> KnownLoss | None:
    """Return the `KnownLoss` of a torch loss (a module, a function, or a partial of one); None for any other loss."""
    if isinstance(loss, nn.Module):
        kind = _MODULES.get(type(loss))
        options = {name: getattr(loss, name, None) for name in ("reduction", "weight", "ignore_index")}
        options = {name: value for name, value in options.items() if value is not None}
        hooked = has_forward_hooks(loss) or "forward" in vars(loss)
        if kind is None or hooked or (kind == "elements" and options.get("weight") is not None and not _bce(loss)):
            return None
        return _known(loss, kind, options, rebuilt=lambda reduction: _with_reduction(loss, reduction))
    function, options = (loss.func, dict(loss.keywords)) if isinstance(loss, partial) else (loss, {})
    kind = _FUNCTIONS.get(function)
    if kind is None or (isinstance(loss, partial) and loss.args):
        return None
    if kind == "elements" and options.get("weight") is not None and function not in _BCE:
        return None  # a weighted MSE divides by the weights
    return _known(
        loss, kind, options, rebuilt=lambda reduction: partial(function, **{**options, "reduction": reduction})
    )


def counted_outside_graphs(loss: Tensor) -> Tensor | None:
    """As `nll_total_weight`, for a compiled model; StepError for a loss that was computed in a compiled region.

    The count of such a loss is not in its graph, so it might be weighted differently from a run without a compiler.
    """
    if type(loss.grad_fn).__name__ != "CompiledFunctionBackward":
        return nll_total_weight(loss)
    raise StepError(
        "the loss is computed inside of a compiled region of Fast(compile=...): its count cannot be found",
        want="the count, or a loss outside of the compiled regions",
        fix="def count(self, batch): return ...   # rows, or valid tokens; or Fast(compile={'regions': {Block}})",
        where=False,
    )


def _known(loss: Loss, kind: str, options: Mapping[str, Any], *, rebuilt: Callable[[str], Loss]) -> KnownLoss | None:
    return KnownLoss(loss, kind, options, rebuilt=rebuilt) if options.get("reduction", "mean") in _REDUCTIONS else None


def _with_reduction(module: nn.Module, reduction: str) -> Loss:
    if type(module) in _AS_FUNCTIONS and not dict(module.named_buffers()):
        function, defaults = _AS_FUNCTIONS[type(module)]
        options = {name: getattr(module, name) for name in defaults}
        changed = {name: value for name, value in options.items() if value != defaults[name]}
        return partial(function, **changed, reduction=reduction)
    twin = copy.copy(module)  # shares the buffers, so that class weights are moved with the original
    twin.reduction = reduction  # type: ignore[assignment]
    return twin.forward  # the module has no hooks


def _bce(module: nn.Module) -> bool:
    return type(module) in {nn.BCELoss, nn.BCEWithLogitsLoss}


def _counted(count: Count, given: MeanLoss | SumLoss) -> Count:
    """Return the count that a step returned; StepError if it is no count."""
    if isinstance(count, Tensor) or (isinstance(count, _NUMBERS) and not count < 0):
        return count
    raise StepError(
        f"a step returned {type(given).__name__}(..., count={count!r})",
        want="a number of rows, tokens or the like, at least 0",
        fix=f"{type(given).__name__}({'loss' if isinstance(given, MeanLoss) else 'total'}, len(target))",
        where=False,
    )


def _named(losses: Mapping[str, Any]) -> StepLoss:
    if not RESERVED.isdisjoint(losses):
        raise StepError(
            f"a step returned the losses {', '.join(map(repr, losses))}: all would be added up and trained",
            want="named losses, none of them called " + ", ".join(sorted(RESERVED)),
            fix='return the loss alone, and report other numbers by self.log("accuracy", value)',
            where=False,
        )
    given = {name: _read_named(name, value) for name, value in losses.items()}
    first = next(iter(given.values()))
    if not all(_alike(first, one) for one in given.values()):
        raise StepError(
            f"the named losses {', '.join(given)} are not of one form",
            want="all of them tensors, all MeanLoss, or all SumLoss, over one and the same count",
            fix=f"return MeanLoss({' + '.join(map(str, given))}, count), and self.log(name, value) for each",
            where=False,
        )
    loss = first.loss
    for one in list(given.values())[1:]:
        loss = loss + one.loss
    named = {name: one.loss.detach() for name, one in given.items()}
    return StepLoss(loss, first.count, first.is_sum, named)


def _read_named(name: str, value: Any) -> StepLoss:
    if isinstance(value, Tensor | MeanLoss | SumLoss):
        return read_step_loss(value)
    raise StepError(
        f"a step returned {_shown(value)} as its loss {name!r}",
        want="named losses that are tensors, MeanLoss or SumLoss",
        fix=f"self.log({name!r}, value) for a number that is not trained",
        where=False,
    )


def _alike(one: StepLoss, other: StepLoss) -> bool:
    """Return whether two losses are both means or both sums and, as far as known on the host, have equal counts."""
    if isinstance(one.count, Tensor) or isinstance(other.count, Tensor):
        same = (one.count is None) == (other.count is None)
    else:
        same = one.count == other.count
    return one.is_sum == other.is_sum and same


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"a step returned {_shown(loss)} as its loss",
            want="a tensor of one element",
            fix='return loss.mean(), or build the loss with reduction="mean"',
            where=False,
        )
    return loss if loss.ndim == 0 else loss.reshape(())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, StepOutput):
        return "a StepOutput inside a StepOutput"
    return "None" if value is None else f"{type(value).__name__}"


_HALVES = {torch.float16, torch.bfloat16}
_REDUCTIONS = {"mean", "sum"}
_FEW = 64
"""The most targets that are counted as a list, which is fastest for few (32 targets: list 2.1 us, NumPy 4.5 us, torch
5 us, between two forwards of a small MLP; one thread, torch 2.13.0+cpu, median of 60)."""
_MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "targets",
    nn.NLLLoss: "targets",
    nn.MSELoss: "elements",
    nn.L1Loss: "elements",
    nn.SmoothL1Loss: "elements",
    nn.HuberLoss: "elements",
    nn.BCELoss: "elements",
    nn.BCEWithLogitsLoss: "elements",
}
_AS_FUNCTIONS: dict[type[nn.Module], tuple[Loss, dict[str, float]]] = {
    nn.CrossEntropyLoss: (F.cross_entropy, {"ignore_index": -100, "label_smoothing": 0.0}),
    nn.NLLLoss: (F.nll_loss, {"ignore_index": -100}),
    nn.MSELoss: (F.mse_loss, {}),
    nn.L1Loss: (F.l1_loss, {}),
}
"""The function that a module calls if it has no buffers, and the defaults of the function's other arguments."""
_FUNCTIONS: dict[Any, str] = {
    F.cross_entropy: "targets",
    F.nll_loss: "targets",
    F.mse_loss: "elements",
    F.l1_loss: "elements",
    F.smooth_l1_loss: "elements",
    F.huber_loss: "elements",
    F.binary_cross_entropy: "elements",
    F.binary_cross_entropy_with_logits: "elements",
}
_BCE = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits}

_MEANS = {F.cross_entropy, F.nll_loss}
"""The torch functions whose mean is over class indices."""


class CountObserver(TorchFunctionMode):
    """Finds the count of a mean over class indices that torch computes without a graph, in an evaluation.

    In training the graph of the loss holds the count (`nll_total_weight`). A `TorchFunctionMode` costs 5 us for each
    torch function that is called inside, so only the call of the loss is observed.
    """

    found = False
    """Whether any count was found so far."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[Tensor, Tensor, Mapping[str, Any]]] = []
        """The means computed in the last call, with targets and keyword arguments."""
        self._observes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, and record its result if it is one of `_MEANS`.

        Torch's modules pass output and target to these functions by position, and all other arguments by keyword.
        """
        result = func(*args, **(kwargs or {}))
        if func in _MEANS:
            self._means.append((result, args[1], kwargs))
        return result

    def observe(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, and record the means that torch computes inside, for `count_of`."""
        if self._observes:  # a nested call: a custom step calls the default one
            return function(*args)
        self._means.clear()
        self._observes = True
        try:
            with self:
                return function(*args)
        finally:
            self._observes = False

    @property
    def seen(self) -> int:
        """The number of means that were computed in the last call."""
        return len(self._means)

    def count_of(self, loss: Tensor) -> Count | None:
        """Return the count of `loss` if torch has computed it as a mean in the last call, else None."""
        for mean, target, options in self._means:
            if mean is loss:
                count = _count_of_mean(target, options)
                self.found = self.found or count is not None
                return count
        return None


def _count_of_mean(target: Tensor, options: Mapping[str, Any]) -> Count | None:
    if options["reduction"] != "mean" or options.get("label_smoothing") or target.is_floating_point():
        return None
    if options["size_average"] is not None or options["reduce"] is not None:  # deprecated forms of `reduction`
        return None
    return count_targets(target, options["ignore_index"], options["weight"])
