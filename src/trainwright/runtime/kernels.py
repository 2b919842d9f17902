"""Make an optimizer's step without what torch wraps around it, where nobody could tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from trainwright.runtime.fused import direct_step, masked, unless

BEFORE, AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def step_of(
    optimizer: Optimizer,
    found_inf: Tensor | None = None,
    rates: Callable[[], list[Tensor]] | None = None,
    *,
    scale: Callable[[], Tensor | None] | None = None,
) -> Callable[[], Any]:
    """Return what makes one step of `optimizer`: its kernels where they are known, else its `step` less the wrapper.

    Torch wraps every `step` to label it for the profiler and to call hooks, which costs 10 to 14 us a call (fused SGD
    and AdamW, six parameters, one x86 core, torch 2.13). Where no profiler runs, no hook is registered, on this
    optimizer or on all, and neither object nor class has been given another `step`, the function inside is called; of
    one that was built with `fused=True` its kernels (see `DirectStep`), unless a scale hangs on it, as that of torch's
    GradScaler. That is asked at every step, so that any of them may come at any time.

    With `found_inf` the kernels leave out every step before which it is 1, and take the learning rates of the groups
    from `rates`, where it is given; the host reads it before a step with hooks, or another one in its place. By what
    `scale` gives the gradients are divided, in the kernels too.
    """
    cls, own = type(optimizer), vars(optimizer)
    wrapper = cls.step
    inner = getattr(wrapper, "__wrapped__", None)
    before_all = getattr(torch_optimizer, "_global_optimizer_pre_hooks", None)
    after_all = getattr(torch_optimizer, "_global_optimizer_post_hooks", None)
    profiled = getattr(torch.autograd, "_profiler_enabled", None)
    known = getattr(wrapper, "hooked", False) and BEFORE in own and AFTER in own
    if not known or inner is None or before_all is None or after_all is None or profiled is None:
        return _as_it_is(optimizer, found_inf, rates, scale=scale)
    direct = direct_step(optimizer, inner)

    def step() -> Any:
        at, by = None if rates is None else rates(), None if scale is None else scale()
        if own[BEFORE] or own[AFTER] or before_all or after_all or cls.step is not wrapper:
            return unless(optimizer, optimizer.step, found_inf, rates=at, scale=by)  # hooks may move weights as well
        if "step" in own:
            # Torch's schedulers wrap `step` to note that it was called, and do nothing else: a kernel can leave it out.
            noted = hasattr(own["step"], "_wrapped_by_lr_sched") and own["step"].__wrapped__ is wrapper
            make = masked if noted else unless
            return make(optimizer, optimizer.step, found_inf, rates=at, scale=by)
        if profiled():
            return masked(optimizer, optimizer.step, found_inf, rates=at, scale=by)
        if direct is not None and "grad_scale" not in own and "found_inf" not in own:
            return direct(found_inf, at, scale=by)
        if found_inf is None and by is None:
            return inner(optimizer)
        return masked(optimizer, partial(inner, optimizer), found_inf, rates=at, scale=by)

    return step


def _as_it_is(
    optimizer: Optimizer,
    found_inf: Tensor | None,
    rates: Callable[[], list[Tensor]] | None,
    *,
    scale: Callable[[], Tensor | None] | None,
) -> Callable[[], Any]:
    """The step of an optimizer whose torch wraps it otherwise."""
    if found_inf is None and scale is None:

        def as_it_is() -> Any:
            return optimizer.step()  # looked up at each step: a torch scheduler may be built on it at any time

        return as_it_is

    def step() -> Any:
        at, by = None if rates is None else rates(), None if scale is None else scale()
        return masked(optimizer, optimizer.step, found_inf, rates=at, scale=by)

    return step
