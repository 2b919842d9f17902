"""Optimizer steps without torch's wrapper: direct calls of the fused kernels of Adam, AdamW, SGD and Adagrad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.core import host_reads
from trainwright.core.torch_private import (
    fused_adagrad,
    fused_adam,
    fused_adamw,
    fused_sgd,
    global_step_hooks,
    is_wrapped_by_scheduler,
    profiler_enabled,
)

ParamGroup = dict[str, Any]
Call = tuple[Callable[..., Any], tuple[list[Tensor], ...], list[Tensor], dict[str, Any]]
"""A kernel, its lists of tensors, the list of step counters among these, and its settings."""


_ONE = torch.ones((), device="cpu")
_REDUCED = (torch.bfloat16, torch.float16)


class DirectStep:
    """Makes a step of a fused optimizer by direct calls of its kernels, bit for bit as its own `step`.

    Torch's `step` groups tensors by device and dtype at every call and handles rare cases; both are skipped here if
    they cannot change the result. Learning rates and states are looked up at every call.
    """

    def __init__(self, optimizer: Optimizer, inner: Callable[[Optimizer], Any]) -> None:
        self._optimizer, self._inner = optimizer, inner
        self._call_of = _CALLS[type(optimizer)]
        self._sizes: list[int] = []
        self._is_uniform = False

    def __call__(
        self, found_inf: Tensor | None = None, lrs: list[Tensor] | None = None, *, scale: Tensor | None = None
    ) -> None:
        """Make one step, by torch's own `step` if a state does not exist yet or a setting is unusual.

        All arguments are 0-dim float32 tensors on the parameters' device. `found_inf`: if it is 1, the step changes
        nothing. `lrs`: the learning rate of each group, instead of `group["lr"]`. `scale`: the kernels divide the
        gradients by it in place first.
        """
        calls = self._calls()
        if calls is None:
            masked(self._optimizer, lambda: self._inner(self._optimizer), found_inf, lrs=lrs, scale=scale)
            return
        with torch.no_grad():
            for index, (kernel, tensors, steps, settings) in enumerate(calls):
                if not tensors[0]:  # no parameter of the group has a gradient
                    continue
                if lrs is not None:
                    settings["lr"] = lrs[index]
                if steps and steps[0].is_cpu:
                    torch._foreach_add_(steps, _ONE, alpha=1.0)  # a Python number would be wrapped for each tensor
                elif steps:
                    torch._foreach_add_(steps, 1)
                kernel(*tensors, **settings, grad_scale=scale, found_inf=found_inf)
                if steps and found_inf is not None:
                    torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _calls(self) -> list[Call] | None:
        optimizer, calls = self._optimizer, list[Call]()
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes, self._is_uniform = sizes, all(_is_uniform(group) for group in groups)
        if not self._is_uniform or vars(optimizer).get("_need_device_dtype_check_for_fused"):
            return None
        for group in groups:
            call = self._call_of(group, optimizer.state)
            if call is None:
                return None
            calls.append(call)
        return calls


def direct_step(optimizer: Optimizer, inner: Callable[[Optimizer], Any] | None) -> DirectStep | None:
    """Return the direct step of a torch optimizer built with `fused=True`; None for any other optimizer.

    `inner`: torch's own step, for cases without a direct call, such as a group with several dtypes.
    """
    groups = optimizer.param_groups
    is_fused = type(optimizer) in _CALLS and all(group.get("fused") is True for group in groups)
    return DirectStep(optimizer, inner) if is_fused and inner is not None else None


def masked(
    optimizer: Any,
    step: Callable[[], Any],
    found_inf: Tensor | None,
    *,
    lrs: list[Tensor] | None = None,
    scale: Tensor | None = None,
) -> Any:
    """Make a fused optimizer's own step with these rates and this scale; a no-op if `found_inf` is 1."""
    if found_inf is None:
        _divide(optimizer, scale)
        return step()
    if why_not_masked(optimizer):  # groups were added since the first check
        return unless(optimizer, step, found_inf, lrs=lrs, scale=scale)
    optimizer.found_inf = found_inf  # torch's `step` passes both attributes to its kernels
    optimizer.grad_scale = scale
    try:
        with _with_lrs(optimizer, lrs):
            return step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def unless(
    optimizer: Any,
    step: Callable[[], Any],
    found_inf: Tensor | None,
    *,
    lrs: list[Tensor] | None = None,
    scale: Tensor | None = None,
) -> Any:
    """Make a step that kernels cannot skip, unless `found_inf` is 1: the host reads the flag and waits for it."""
    _divide(optimizer, scale)
    if found_inf is None:
        return step()
    left_out, *read = host_reads.read([found_inf, *([] if lrs is None else lrs)])
    if left_out:
        return None
    with _with_lrs(optimizer, None if lrs is None else read):
        return step()


def _divide(optimizer: Optimizer, scale: Tensor | None) -> None:
    """Divide the gradients by `scale` in place, for steps that do not."""
    if scale is not None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, scale)


@contextmanager
def _with_lrs(optimizer: Optimizer, lrs: Sequence[Tensor | float] | None) -> Iterator[None]:
    """Set the learning rates of the groups inside the block; no-op for None."""
    groups = optimizer.param_groups
    own = [group["lr"] for group in groups]
    for group, rate in zip(groups, own if lrs is None else lrs, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate in zip(groups, own, strict=True):
            group["lr"] = rate


def why_not_masked(optimizer: Optimizer) -> str:
    """Return why the kernels of an optimizer cannot skip a step by `found_inf`; "" if they can.

    Fused SGD leaves its momentum uninitialized if its first step is skipped. `ready_to_mask` creates it as zeros, which
    gives the same first step unless the gradient is dampened.
    """
    groups, name = optimizer.param_groups, type(optimizer).__name__
    if type(optimizer) not in _CALLS:
        return f"{name} has no fused kernel that leaves out a step"
    if not all(group.get("fused") is True for group in groups):
        return f"{name} was not built with fused=True"
    if len({p.device for group in groups for p in group["params"]}) > 1:
        return f"{name} has parameters on several devices"
    if any(group.get("momentum", 0) and group["dampening"] for group in groups):
        return "SGD with dampening cannot leave out its first step"
    return ""


def broken_dtype(optimizer: Optimizer) -> torch.dtype | None:
    """Return the dtype of CPU parameters that this fused SGD updates wrongly; None for all other optimizers.

    Up to torch 2.13 the CPU kernel does not update full SIMD vectors of bfloat16 and float16 weights, and reads their
    momentum out of bounds (https://github.com/pytorch/pytorch/issues/191763).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    return dtype_broken_in_sgd(parameter for group in groups for parameter in group["params"])


def dtype_broken_in_sgd(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the first dtype of these parameters that torch's fused SGD updates wrongly on the CPU, or None."""
    kinds = dict.fromkeys(p.dtype for p in parameters if p.device.type == "cpu" and p.dtype in _REDUCED)
    return next((dtype for dtype in kinds if not _moves(dtype)), None)


def ready_to_mask(optimizer: Optimizer) -> None:
    """Create the momentum of SGD as zeros, so that its first step can be skipped."""
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        for parameter in group["params"] if group["momentum"] and not group["dampening"] else ():
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


@cache
def _moves(dtype: torch.dtype) -> bool:
    """Return whether one step of the kernel updates all elements of a tensor of this dtype; tried on 64 elements."""
    weights, gradients = (fill(64, dtype=dtype, device="cpu") for fill in (torch.zeros, torch.ones))
    with torch.no_grad():
        fused_sgd(
            [weights],
            [gradients],
            [],
            lr=1.0,
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )
    return bool((weights == -1).all())


def _is_uniform(group: ParamGroup) -> bool:
    """Return whether all parameters are plain tensors of one device and dtype, so that one kernel call suffices."""
    kinds = {(type(p) is torch.nn.Parameter, p.device, p.dtype) for p in group["params"]}
    return len(kinds) == 1 and next(iter(kinds))[0]


def _gradients(group: ParamGroup) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the parameters with gradients of a group, and the gradients; None for a setting without a direct call."""
    if group["fused"] is not True or group["differentiable"] or isinstance(group["lr"], Tensor):
        return None
    parameters: list[Tensor] = group["params"]
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    for gradient in gradients:
        if gradient is None:
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            break
    for gradient in gradients:
        if gradient.is_sparse:
            return None
    return parameters, gradients


def _adam(group: ParamGroup, state: Any) -> Call | None:
    found = _gradients(group)
    beta1, beta2 = group["betas"]
    if found is None or group["capturable"] or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return None
    parameters, gradients = found
    states = [state[parameter] for parameter in parameters]
    if not all(states):
        return None
    steps = [own["step"] for own in states]
    amsgrad = group["amsgrad"]
    tensors = (
        parameters,
        gradients,
        [own["exp_avg"] for own in states],
        [own["exp_avg_sq"] for own in states],
        [own["max_exp_avg_sq"] for own in states] if amsgrad else [],
        steps,
    )
    settings = {
        "amsgrad": amsgrad,
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }
    kernel = fused_adamw if group["decoupled_weight_decay"] else fused_adam
    return kernel, tensors, steps, settings


def _sgd(group: ParamGroup, state: Any) -> Call | None:
    found = _gradients(group)
    if found is None:
        return None
    parameters, gradients = found
    momentum, buffers = group["momentum"], list[Tensor]()
    if momentum != 0:
        buffers = [state[parameter].get("momentum_buffer") for parameter in parameters]
        for buffer in buffers:
            if buffer is None:
                return None
    settings = {
        "weight_decay": group["weight_decay"],
        "momentum": momentum,
        "lr": group["lr"],
        "dampening": group["dampening"],
        "nesterov": group["nesterov"],
        "maximize": group["maximize"],
        "is_first_step": False,
    }
    return fused_sgd, (parameters, gradients, buffers), [], settings


def _adagrad(group: ParamGroup, state: Any) -> Call | None:
    found = _gradients(group)
    if found is None:
        return None
    parameters, gradients = found
    states = [state[parameter] for parameter in parameters]
    if not all(states):
        return None
    steps = [own["step"] for own in states]
    settings = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    return fused_adagrad, (parameters, gradients, [own["sum"] for own in states], steps), steps, settings


_CALLS: dict[type[Optimizer], Callable[[ParamGroup, Any], Call | None]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}

BEFORE, AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """Return a function that makes one step of `optimizer`: by its kernels, or by its `step` without the wrapper.

    Torch wraps every `step` to label it for the profiler and to call hooks, which costs 10 to 14 us per call (fused SGD
    and AdamW, six parameters, one x86 core, torch 2.13). The wrapper is skipped unless a profiler runs, hooks exist (of
    this optimizer or global ones) or `step` was replaced. Optimizers built with `fused=True` call their kernels (see
    `DirectStep`), unless torch's GradScaler has set a scale. All of this is checked at every step: a profiler, a hook
    or a scale may be added at any time.
    """
    cls, own = type(optimizer), vars(optimizer)
    inner, wrapper = inner_step(optimizer), cls.step
    if inner is None:
        return partial(_look_up_and_step, optimizer)
    direct = direct_step(optimizer, inner)
    before_all, after_all = global_step_hooks()

    def step() -> Any:
        hooked = own[BEFORE] or own[AFTER] or before_all or after_all
        if hooked or "step" in own or cls.step is not wrapper or profiler_enabled():
            return optimizer.step()
        if direct is not None and "grad_scale" not in own and "found_inf" not in own:
            return direct()
        return inner(optimizer)

    return step


def _look_up_and_step(optimizer: Any) -> Any:
    """Call the current `step`, which a torch scheduler may replace at any time."""
    return optimizer.step()


def maskable_step_of(
    optimizer: Optimizer,
    found_inf: Tensor | None,
    lrs: Callable[[], list[Tensor]] | None = None,
    *,
    scale: Callable[[], Tensor | None] | None = None,
) -> Callable[[], Any]:
    """Return a function that makes one step as `step_of` does, with flag, rates and scale in device tensors.

    `found_inf`: if it is 1, the kernels skip the step. For a step with hooks, or a replaced `step`, the host reads it.
    `lrs`: returns the learning rates of the groups. `scale`: returns the divisor of the gradients, which the kernels
    apply.
    """
    cls, own = type(optimizer), vars(optimizer)
    inner, wrapper = inner_step(optimizer), cls.step
    direct = direct_step(optimizer, inner)

    def step() -> Any:
        at, by = None if lrs is None else lrs(), None if scale is None else scale()
        if inner is None:
            return masked(optimizer, optimizer.step, found_inf, lrs=at, scale=by)
        if own[BEFORE] or own[AFTER] or any(global_step_hooks()) or cls.step is not wrapper:
            return unless(optimizer, optimizer.step, found_inf, lrs=at, scale=by)  # hooks must not run if it is skipped
        if "step" in own:
            # Torch's schedulers wrap `step` only to count calls, so the kernels may skip the step.
            only_counts = is_wrapped_by_scheduler(own["step"]) and own["step"].__wrapped__ is wrapper
            make = masked if only_counts else unless
            return make(optimizer, optimizer.step, found_inf, lrs=at, scale=by)
        if profiler_enabled():
            return masked(optimizer, optimizer.step, found_inf, lrs=at, scale=by)
        if direct is not None and "grad_scale" not in own and "found_inf" not in own:
            return direct(found_inf, at, scale=by)
        return masked(optimizer, partial(inner, optimizer), found_inf, lrs=at, scale=by)

    return step


def inner_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return the function inside torch's wrapper of `step`; None if `step` is wrapped in another way."""
    wrapper, own = type(optimizer).step, vars(optimizer)
    is_known = getattr(wrapper, "hooked", False) and BEFORE in own and AFTER in own
    return getattr(wrapper, "__wrapped__", None) if is_known else None
