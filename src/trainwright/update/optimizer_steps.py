"""The optimizers of a run by name, each with its gradients, clip, step and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import did_you_mean
from trainwright.core.trees import parameters_in, parameters_of
from trainwright.modules.dtensors import full_tensor, is_sharded
from trainwright.optim.clip import ClipNorm
from trainwright.optim.fused import maskable_step_of, step_of, why_not_masked
from trainwright.optim.gradients import Gradients
from trainwright.optim.named import ONLY
from trainwright.protocols import Clip, Tree

_BESIDE_ZERO = 1e-6
"""The epsilon that torch's `clip_grad_norm_` adds to the norm before the division."""
_FUSED = {torch.float32, torch.float16, torch.bfloat16}


class OptimizerStep:
    """The step of one optimizer: measures and clips gradients, then runs its kernels."""

    def __init__(self, name: str, optimizer: Optimizer, *, clip: Clip | None, wants_norm: bool) -> None:
        self.name, self.optimizer, self.clip = name, optimizer, clip
        self.measures_norm = wants_norm and not isinstance(clip, ClipNorm)
        """Whether the norm is wanted and must be computed separately from clipping."""
        self.measures_or_clips = self.measures_norm or clip is not None
        """Whether gradients are measured or clipped before the step."""
        self.norm: Tensor | float | None = None
        """The norm of the last applied gradient before clipping; a tensor until it is read."""
        self._may_be_sharded = clip is not None and is_sharded(*parameters_in(optimizer))
        """Whether the norm that a clip returns may be a DTensor."""
        self.step = step_of(optimizer)
        """Makes one step of the optimizer."""
        self.fuses_clipping = False
        """Whether the kernels of the step unscale and clip the gradients."""
        self.factor: float | Tensor = 1.0
        """The factor of the gradients that the kernels apply."""
        self.scale: Tensor | None = None
        """The divisor of the gradients that the kernels apply: torch's `grad_scale`."""
        self.used_lrs: list[float] | None = None
        """The rates of the last update, if user code may have changed them since; else None."""
        self.take_groups()

    def take_groups(self, order: Sequence[Tensor] = ()) -> None:
        """Read the parameter groups again, since groups may be added at any time; `order`: that of norm sums."""
        self.gradients = Gradients(self.optimizer, order=order)
        self.groups = len(self.optimizer.param_groups)

    def bind_kernels(
        self, found_inf: Tensor | None, lrs: Callable[[], list[Tensor]] | None, *, fuses_clipping: bool
    ) -> None:
        """Bind the kernels of the step to the flag `found_inf` and the rates of `lrs`.

        `fuses_clipping`: whether the kernels also unscale and clip the gradients.
        """
        self.fuses_clipping = fuses_clipping
        scale = (lambda: self.scale) if fuses_clipping else None
        self.step = maskable_step_of(self.optimizer, found_inf, lrs, scale=scale)

    def measure_and_clip(self) -> None:
        """Measure the norm of the gradients, if it is wanted, and clip them."""
        if self.fuses_clipping:
            self._fuse_clipping()
            return
        self.norm = self.gradients.norm() if self.measures_norm else None
        if self.clip is not None:
            norm = self.clip(self.gradients.parameters)
            norm = full_tensor(norm) if self._may_be_sharded and norm is not None else norm
            self.norm = norm if self.norm is None else self.norm

    def can_fuse_clipping(self) -> bool:
        """Return whether the kernels of the step can unscale and clip, so that only the norm needs a separate pass."""
        usual = type(self.gradients) is Gradients and type(self.clip) is ClipNorm and self.clip.norm_type == 2.0
        kinds = {parameter.dtype for parameter in self.gradients.parameters}
        return usual and kinds <= _FUSED and not why_not_masked(self.optimizer)

    def _fuse_clipping(self) -> None:
        """Measure the norm, and set the divisor of the kernels, which combines `factor` and the clip."""
        assert isinstance(self.clip, ClipNorm)
        self.norm = norm = self.gradients.norm() * self.factor
        share = torch.clamp(self.clip.max_norm / (norm + _BESIDE_ZERO), max=1.0)
        self.scale = (share * self.factor).reciprocal().float()

    @property
    def lrs(self) -> list[float]:
        """The current learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class SelectedOptimizers(NamedTuple):
    """One or all optimizers of a run, with their gradients together."""

    steps: tuple[OptimizerStep, ...]
    gradients: Gradients


class OptimizerSteps:
    """The steps of all optimizers of a run, together and by name."""

    def __init__(
        self, optimizers: Mapping[str, Optimizer], clip: Any, *, wants_norm: bool, modules: Sequence[nn.Module] = ()
    ) -> None:
        self._modules = modules
        clips = clip if isinstance(clip, Mapping) else dict.fromkeys(optimizers, clip)
        self._steps = tuple(
            OptimizerStep(name, optimizer, clip=clips.get(name), wants_norm=wants_norm)
            for name, optimizer in optimizers.items()
        )
        self.named = len(optimizers) > 1 or ONLY not in optimizers
        """Whether the optimizers were given by name, so that the names of numbers include it."""
        self.take_groups()

    def choose(self, name: str) -> SelectedOptimizers:
        """Return the optimizer of this name; SettingError if there is none."""
        if name not in self._alone:
            fix = f"one of {', '.join(map(repr, self._alone))}" if self.named else "leave the name out"
            raise SettingError(f"no optimizer {name!r}.{did_you_mean(name, self._alone)}", fix=fix)
        return self._alone[name]

    def one(self, name: str | None, caller: str) -> SelectedOptimizers:
        """Return the optimizer of this name, or the only one; SettingError for None with several optimizers."""
        if name is None and len(self._steps) > 1:
            names = ", ".join(map(repr, self._alone))
            what = f"{caller} without a name, and there are several optimizers: {names}"
            raise SettingError(what, fix=f"name one of {names}")
        return self.all if name is None else self.choose(name)

    def take_groups(self) -> None:
        """Read the parameter groups of every optimizer again."""
        # The order of `clip_grad_norm_(model.parameters())`, not of the groups: it determines the last bits of a norm.
        order = [parameter for module in self._modules for parameter in parameters_of(module)]
        for one in self._steps:
            one.take_groups(order)
        self._alone = {one.name: SelectedOptimizers((one,), one.gradients) for one in self._steps}
        if len(self._steps) == 1:
            self.all = SelectedOptimizers(self._steps, self._steps[0].gradients)
        else:
            together = Gradients(*(one.optimizer for one in self._steps), order=order)
            self.all = SelectedOptimizers(self._steps, together)

    def lower_flags(self) -> None:
        """Lower the flags for non-finite values."""
        self.all.gradients.lower_flags()
        if len(self._steps) > 1:
            for one in self._steps:
                one.gradients.lower_flags()

    @property
    def lrs(self) -> tuple[float, ...]:
        """The rate of each parameter group of each optimizer in the last update."""
        return tuple(rate for one in self._steps for rate in one.used_lrs or one.lrs)

    def record_lrs_of(self, optimizer: Optimizer) -> None:
        """Record the current rates before a step of this optimizer, since user code may change them after it."""
        for one in self._steps:
            if one.optimizer is optimizer:
                one.used_lrs = one.lrs

    def record_used_lrs(self) -> None:
        """Record the rates of the last update before hooks can change them, unless its step has recorded them."""
        for one in self._steps:
            if one.used_lrs is None:
                one.used_lrs = one.lrs

    def clear_used_lrs(self) -> None:
        """Drop the recorded rates, before the next update."""
        for one in self._steps:
            one.used_lrs = None

    def used_lrs(self) -> Tree:
        """Return the recorded rates of optimizers whose groups have other rates by now, for a checkpoint."""
        return {one.name: one.used_lrs for one in self._steps if one.used_lrs not in (None, one.lrs)}

    def load_used_lrs(self, tree: Tree) -> None:
        """Load recorded rates from a checkpoint, for the history row of its last update."""
        for one in self._steps:
            one.used_lrs = tree.get(one.name)

    def numbers(self) -> dict[str, float]:
        """Return `lr_<name>` of each named optimizer; empty for a single optimizer without a name."""
        if not self.named:
            return {}
        return {f"lr_{one.name}": (one.used_lrs or one.lrs)[0] for one in self._steps}

    def norms(self) -> dict[str, float]:
        """Return `grad_norm_<name>` of each optimizer with a measured norm."""
        return {f"grad_norm_{one.name}": float(one.norm) for one in self._steps if one.norm is not None}
