"""The gradients of one or several optimizers: zero, scale, check for non-finite values, norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.torch_private import check_and_unscale, sparse_parts
from trainwright.core.trees import parameters_in
from trainwright.modules.dtensors import Shards, is_sharded, local_shards

_gradient = attrgetter("grad")
_NARROW = {torch.float32, torch.float16, torch.bfloat16}


class Gradients:
    """Operations on all gradients of one or several optimizers: zero, multiply, check, norm.

    If parameters are sharded, all ranks call the same methods: a norm is that of the complete gradients, and a flag is
    1.0 on all ranks if any shard contains NaN or infinity.

    Args:
        *optimizers: The optimizers.
        order: The order of summation of norms, usually `model.parameters()`; other parameters come last. By default
            the order of the optimizers' groups. The order changes the last bits of a norm.
    """

    __slots__ = (
        "_dropped",
        "_flags",
        "_is_narrow",
        "_one",
        "_uniform_device",
        "_unsharded",
        "_zero_grads",
        "parameters",
    )

    def __new__(cls, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> Gradients:
        """Make a `_ShardedGradients` if any parameter is sharded."""
        chosen: Any = _ShardedGradients if cls is Gradients and is_sharded(*parameters_in(*optimizers)) else cls
        made: Gradients = super().__new__(chosen)
        return made

    def __init__(self, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> None:
        place = {id(p): index for index, p in enumerate(order)}
        found = {id(p): p for p in parameters_in(*optimizers)}  # two optimizers may train the same parameter
        self.parameters: list[Tensor] = sorted(found.values(), key=lambda p: place.get(id(p), len(place)))
        self._unsharded = self.parameters
        custom = [optimizer for optimizer in optimizers if has_custom_zero_grad(optimizer)]
        self._zero_grads = [optimizer.zero_grad for optimizer in custom]
        self._dropped = parameters_in(*(optimizer for optimizer in optimizers if optimizer not in custom))
        """The parameters whose gradients `zero` sets to None."""
        kinds = {(p.device, p.dtype) for p in self.parameters}
        self._uniform_device = next(iter(kinds))[0] if len(kinds) == 1 else None
        self._is_narrow = all(dtype in _NARROW for _, dtype in kinds)
        """Whether the AMP kernel can multiply all gradients: its factor is a float32."""
        devices = dict.fromkeys(p.device for p in self.parameters)  # ordered: the flag on the first device is returned
        self._flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device in devices}
        self._one = {device: torch.ones((), dtype=torch.float32, device=device) for device in devices}

    def zero(self) -> None:
        """Set every gradient to None; for an optimizer that overrides `zero_grad`, call that."""
        for zero_grad in self._zero_grads:
            zero_grad()
        for parameter in self._dropped:
            parameter.grad = None

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply every gradient by `factor` in place."""
        for gradients in self._grouped().values():
            here = factor.to(gradients[0].device) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(gradients, here)

    def multiply_and_check(self, factor: float | Tensor = 1.0) -> Tensor:
        """Multiply every gradient by `factor` in place; return 1.0 if any element is NaN or infinite, else 0.0.

        The flag is a 0-dim float32 tensor on the first device, torch's `found_inf`. One pass of torch's AMP kernel.
        With several devices the maximum of their flags is returned, not the sum: fused kernels compare with 1.
        """
        device, plain = self._uniform_device, isinstance(factor, float) and factor == 1.0
        if device is not None and (plain or self._is_narrow):
            flag = self._flags[device]
            scale = self._one[device] if plain else _single(factor, device)
            try:
                check_and_unscale(list(map(_gradient, self.parameters)), flag, scale)
                return flag
            except (TypeError, NotImplementedError):
                pass  # a missing or sparse gradient: the kernel has raised before it multiplied any
        return self._multiply_and_check_groups(factor)

    def _multiply_and_check_groups(self, factor: float | Tensor) -> Tensor:
        """Multiply and check the gradients, group by group of one device and dtype."""
        plain = isinstance(factor, float) and factor == 1.0
        for (device, dtype), gradients in self._grouped().items():
            scale = self._one[device]
            if not plain and dtype == torch.float64:  # the kernel's factor is a float32
                torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)
            elif not plain:
                scale = _single(factor, device)
            check_and_unscale(gradients, self._flags[device], scale)
        flags = list(self._flags.values())
        return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).amax()

    @property
    def flag(self) -> Tensor | None:
        """The flag tensor, which remains 1.0 until `lower_flags`; None with several devices."""
        return next(iter(self._flags.values())) if len(self._flags) == 1 else None

    def check_too(self, values: list[Tensor], flag: Tensor | None = None) -> None:
        """Set `flag` (by default the flag of their device) to 1.0 if any of these scalars is NaN or infinite."""
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for value in values:
            kinds[value.dtype].append(value.detach())
        for alike in kinds.values():
            device = alike[0].device
            check_and_unscale(alike, self._flags[device] if flag is None else flag, self._one[device])

    def lower_flags(self) -> None:
        """Set all flags to 0.0, which the kernel never does."""
        for flag in self._flags.values():
            flag.zero_()

    def norm(self) -> Tensor:
        """Return the total 2-norm of all gradients, a 0-dim tensor on the first device."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])

    def _grouped(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in self._unsharded:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = _values_of(parameter, gradient)
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            groups[gradient.device, gradient.dtype].append(gradient)
        return groups


class _ShardedGradients(Gradients):
    """Gradients of sharded parameters: scaled locally; flags and norms are reduced over the ranks."""

    __slots__ = ("_sharded", "_shards")

    def __init__(self, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> None:
        super().__init__(*optimizers, order=order)
        self.parameters = self._shards = Shards(self.parameters)
        self._unsharded = [parameter for parameter in self.parameters if not is_sharded(parameter)]
        self._sharded = [parameter for parameter in self.parameters if is_sharded(parameter)]
        self._uniform_device = None  # the kernel does not support DTensors

    def multiply_and_check(self, factor: float | Tensor = 1.0) -> Tensor:
        """Multiply every gradient by `factor` in place; return the flag over all ranks, by one scalar all-reduce."""
        return self._shards.max_over_ranks(super().multiply_and_check(factor))

    def norm(self) -> Tensor:
        """Return the total 2-norm of all complete gradients, on every rank."""
        return self._shards.norm()

    def _grouped(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        groups = super()._grouped()
        for gradient in local_shards(p.grad for p in self._sharded if p.grad is not None):
            if gradient.numel():
                real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                groups[real.device, real.dtype].append(real)
        return groups


def has_custom_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether an optimizer overrides `zero_grad`."""
    return type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)


def _single(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return the factor as a float32 tensor, created on the device: a copy from the host would block."""
    if isinstance(factor, Tensor):
        return factor.to(device, torch.float32)
    return torch.full((), factor, dtype=torch.float32, device=device)


def _values_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient for in-place changes, without a sum over duplicate rows.

    The optimizer sums duplicates; a sum here would round differently. float16 is summed first, as torch's GradScaler
    does: the sum may overflow even if no term does.
    """
    if gradient.dtype == torch.float16 or not sparse_parts(gradient)[1].is_contiguous():
        gradient = gradient.coalesce() if gradient.dtype == torch.float16 else gradient.clone()
        parameter.grad = gradient
    return sparse_parts(gradient)[1]
