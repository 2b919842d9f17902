"""The gradients of one optimizer or of several: zeroed, multiplied once by what is owed, checked, measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.trees import parameters_in
from trainwright.modules.dtensors import Shards, is_sharded, local

_gradient = attrgetter("grad")
_check = torch._amp_foreach_non_finite_check_and_unscale_


class Gradients:
    """The parameters of optimizers, grouped for the kernels once instead of at each update.

    Where some are shards, the processes that hold the others make theirs alike, and call the same methods: a norm is
    that of the whole gradients, and a flag is 1.0 on all of them where any shard is not finite.

    `order`: parameters in the order in which norms are summed, usually `model.parameters()`; those that are not in it
    come last. Without it the order is that of the optimizers' groups. The order changes the last bits of a norm.
    """

    __slots__ = ("_alike", "_flags", "_grouping", "_one", "_plain", "_zero_grads", "parameters")

    def __new__(cls, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> Gradients:
        """Choose once how the gradients are worked on: on shards or on whole ones."""
        chosen: Any = _ShardedGradients if cls is Gradients and is_sharded(*parameters_in(*optimizers)) else cls
        made: Gradients = super().__new__(chosen)
        return made

    def __init__(self, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> None:
        place = {id(p): index for index, p in enumerate(order)}
        found = {id(p): p for p in parameters_in(*optimizers)}  # two optimizers may train the same one
        self.parameters: list[Tensor] = sorted(found.values(), key=lambda p: place.get(id(p), len(place)))
        self._plain = self.parameters
        self._zero_grads = [
            optimizer.zero_grad
            for optimizer in optimizers
            if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        ]
        kinds = {(p.device, p.dtype) for p in self.parameters}
        self._alike = next(iter(kinds))[0] if len(kinds) == 1 else None
        devices = dict.fromkeys(p.device for p in self.parameters)  # in this order: the first one's flag is returned
        self._grouping = _grouping(optimizers, place)
        self._flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device in devices}
        self._one = {device: torch.ones((), dtype=torch.float32, device=device) for device in devices}

    @classmethod
    def of(cls, *optimizers: Optimizer, before: Gradients | None = None, order: Iterable[Tensor] = ()) -> Gradients:
        """Return the gradients of optimizers; those from `before`, flag and all, where nothing has changed."""
        listed = list(order)
        place = {id(p): index for index, p in enumerate(listed)}
        if before is not None and before._grouping == _grouping(optimizers, place):
            return before
        return cls(*optimizers, order=listed)

    def zero(self) -> None:
        """Drop every gradient (`set_to_none`), by the optimizer's own method too where it overrides torch's."""
        for zero_grad in self._zero_grads:
            zero_grad()
        if not self._zero_grads:
            for parameter in self.parameters:
                parameter.grad = None

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply every gradient by `factor` in place."""
        for gradients in self._grouped().values():
            here = factor.to(gradients[0].device) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(gradients, here)

    def multiply_and_check(self, factor: float | Tensor = 1.0) -> Tensor:
        """Multiply every gradient by `factor` and return a flag, 1.0 where any is NaN or infinite, else 0.0.

        One pass of torch's AMP kernel, 0-dim float32 on the first device. The flag is torch's `found_inf`; with
        several devices the largest is returned, never their sum, which fused kernels would not take for 1.
        """
        plain = isinstance(factor, float) and factor == 1.0
        if plain and self._alike is not None:
            flag = self._flags[self._alike]
            try:
                _check(list(map(_gradient, self.parameters)), flag, self._one[self._alike])
                return flag
            except (TypeError, NotImplementedError):
                pass  # a parameter without a gradient, or a sparse one: sorted out below
        for (device, dtype), gradients in self._grouped().items():
            scale = self._one[device]
            if not plain and dtype == torch.float64:  # the kernel's factor is a float32
                torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)
            elif not plain:
                scale = _single(factor, device)
            _check(gradients, self._flags[device], scale)
        flags = list(self._flags.values())
        return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).amax()

    @property
    def flag(self) -> Tensor | None:
        """The flag itself, which stays raised until it is lowered; None where there are several devices."""
        return next(iter(self._flags.values())) if len(self._flags) == 1 else None

    def check_too(self, values: list[Tensor], flag: Tensor | None = None) -> None:
        """Raise the flag, or `flag`, for these numbers as well, scalars on its device, if one is NaN or infinite."""
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for value in values:
            kinds[value.dtype].append(value.detach())
        for alike in kinds.values():
            device = alike[0].device
            _check(alike, self._flags[device] if flag is None else flag, self._one[device])

    def lower_flags(self) -> None:
        """Forget a non-finite gradient: the kernel only ever raises its flag."""
        for flag in self._flags.values():
            flag.zero_()

    def norm(self) -> Tensor:
        """The 2-norm of all gradients together, a 0-dim tensor on the first device."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])

    def _grouped(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in self._plain:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = _writable_values(parameter, gradient)
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            groups[gradient.device, gradient.dtype].append(gradient)
        return groups


class _ShardedGradients(Gradients):
    """Gradients of which each process holds a shard: worked on here, and told of together."""

    __slots__ = ("_cut", "_shards")

    def __init__(self, *optimizers: Optimizer, order: Iterable[Tensor] = ()) -> None:
        super().__init__(*optimizers, order=order)
        self.parameters = self._shards = Shards(self.parameters)
        self._plain = [parameter for parameter in self.parameters if not is_sharded(parameter)]
        self._cut = [parameter for parameter in self.parameters if is_sharded(parameter)]
        self._alike = None  # the kernel takes what lies here, not what is spread

    def multiply_and_check(self, factor: float | Tensor = 1.0) -> Tensor:
        """Multiply every gradient by `factor` and return the flag of all processes: one reduction of a scalar."""
        return self._shards.highest(super().multiply_and_check(factor))

    def norm(self) -> Tensor:
        """The 2-norm of all gradients together, on every process."""
        return self._shards.norm()

    def _grouped(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        groups = super()._grouped()
        for gradient in local(p.grad for p in self._cut if p.grad is not None):
            if gradient.numel():
                real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                groups[real.device, real.dtype].append(real)
        return groups


def _single(factor: float | Tensor, device: torch.device) -> Tensor:
    """The factor as a float32 there; made there, since a copy from the host would be waited for."""
    if isinstance(factor, Tensor):
        return factor.to(device, torch.float32)
    return torch.full((), factor, dtype=torch.float32, device=device)


def _grouping(optimizers: tuple[Optimizer, ...], place: dict[int, int]) -> list[Any]:
    """What is looked at once, when gradients are grouped."""
    kinds = [
        (type(optimizer).zero_grad, vars(optimizer).get("zero_grad"), len(group["params"]))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return [
        kinds,
        [(id(p), p.device, p.dtype, is_sharded(p), place.get(id(p))) for p in parameters_in(*optimizers)],
    ]


def _writable_values(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The values of a sparse gradient, to be changed in place; rows that occur twice are left to the optimizer.

    To add them up here would round otherwise than the optimizer does. Half precision is added up first, as torch's
    GradScaler does: there the sum may overflow where no term does.
    """
    if gradient.dtype == torch.float16 or not gradient._values().is_contiguous():
        gradient = gradient.coalesce() if gradient.dtype == torch.float16 else gradient.clone()
        parameter.grad = gradient
    return gradient._values()
