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
    """The parameters of optimizers, grouped by device and dtype once instead of at each update.

    If some parameters are sharded, all ranks build this alike and call the same methods: a norm is that of the complete
    gradients, and a flag is 1.0 on all ranks if any shard is not finite.

    Args:
        *optimizers: The optimizers.
        order: Parameters in the order in which norms are summed, usually `model.parameters()`; others come last.
            Without it the order is that of the optimizers' groups. The order changes the last bits of a norm.
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
        """Choose the class: for sharded parameters, or for plain ones."""
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
        """Whether the kernel can multiply the gradients, by a factor in float32."""
        devices = dict.fromkeys(p.device for p in self.parameters)  # in this order: the flag on the first is returned
        self._flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device in devices}
        self._one = {device: torch.ones((), dtype=torch.float32, device=device) for device in devices}

    def zero(self) -> None:
        """Set every gradient to None; an optimizer that overrides `zero_grad` has its own method called."""
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
        """Multiply every gradient by `factor` and return a flag: 1.0 if any is NaN or infinite, else 0.0.

        One pass of torch's AMP kernel, 0-dim float32 on the first device. The flag is torch's `found_inf`; with
        several devices the largest is returned, never their sum, which fused kernels would not take for 1.
        """
        device, plain = self._uniform_device, isinstance(factor, float) and factor == 1.0
        if device is not None and (plain or self._is_narrow):
            flag = self._flags[device]
            scale = self._one[device] if plain else _single(factor, device)
            try:
                check_and_unscale(list(map(_gradient, self.parameters)), flag, scale)
                return flag
            except (TypeError, NotImplementedError):
                pass  # a parameter without a gradient, or a sparse one: nothing is multiplied yet
        return self._multiply_and_check_groups(factor)

    def _multiply_and_check_groups(self, factor: float | Tensor) -> Tensor:
        """Multiply and check the gradients of each device and dtype."""
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
        """The flag tensor, which stays 1.0 until `lower_flags`; None if there are several devices."""
        return next(iter(self._flags.values())) if len(self._flags) == 1 else None

    def check_too(self, values: list[Tensor], flag: Tensor | None = None) -> None:
        """Set the flag, or `flag`, to 1.0 if any of these scalars on its device is NaN or infinite."""
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for value in values:
            kinds[value.dtype].append(value.detach())
        for alike in kinds.values():
            device = alike[0].device
            check_and_unscale(alike, self._flags[device] if flag is None else flag, self._one[device])

    def lower_flags(self) -> None:
        """Set all flags to 0.0; the kernel only ever sets them to 1.0."""
        for flag in self._flags.values():
            flag.zero_()

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients together, a 0-dim tensor on the first device."""
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
    """Gradients of which each rank holds a shard: scaled locally; flags and norms are reduced over the ranks."""

    __slots__ = ("_sharded", "_shards")

    def __init__(self, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> None:
        super().__init__(*optimizers, order=order)
        self.parameters = self._shards = Shards(self.parameters)
        self._unsharded = [parameter for parameter in self.parameters if not is_sharded(parameter)]
        self._sharded = [parameter for parameter in self.parameters if is_sharded(parameter)]
        self._uniform_device = None  # the kernel takes local tensors, no DTensors

    def multiply_and_check(self, factor: float | Tensor = 1.0) -> Tensor:
        """Multiply every gradient by `factor` and return the flag of all ranks: one reduction of a scalar."""
        return self._shards.max_over_ranks(super().multiply_and_check(factor))

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients together, on every rank."""
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
    """Return the factor as float32 on the device; created there, since a copy from the host would block."""
    if isinstance(factor, Tensor):
        return factor.to(device, torch.float32)
    return torch.full((), factor, dtype=torch.float32, device=device)


def _values_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient, to be changed in place, without summing rows that occur twice.

    The optimizer sums them; a sum here would round differently. Half precision is summed first, as torch's GradScaler
    does: there the sum may overflow although no term does.
    """
    if gradient.dtype == torch.float16 or not sparse_parts(gradient)[1].is_contiguous():
        gradient = gradient.coalesce() if gradient.dtype == torch.float16 else gradient.clone()
        parameter.grad = gradient
    return sparse_parts(gradient)[1]
