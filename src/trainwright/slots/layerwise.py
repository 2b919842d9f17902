"""What optimizers share that scale the update of each layer by norms: the tensors of a step, and the ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.base.checks import check_choice, check_number
from trainwright.base.errors import SettingError, message
from trainwright.runtime.shards import is_sharded, joined_norms, local

Group = dict[str, Any]
CHOICES = ("weights", "all")
_REDUCED = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Alike:
    """Parameters of one device and type that have gradients: themselves, their gradients and states, as they lie here.

    Of a parameter in shards that is the part that this process holds, to be changed in place.
    """

    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    states: dict[str, list[Tensor]]


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose groups say by `adapt` which parameters have an update scaled by their norm."""

    moments: tuple[str, ...] = ()
    """The states of a parameter that have its shape, and begin at zero."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; SettingError for a setting that cannot work."""
        super().add_param_group(param_group)
        self.check(param_group)

    def check(self, group: Group) -> None:
        """Refuse settings of a group that cannot work."""
        owner = type(self).__name__
        for name in ("lr", "weight_decay"):
            check_number(group[name], f"{owner}({name}={group[name]!r})", least=0)
        check_choice(group["adapt"], owner, "adapt", choices=CHOICES)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; gives the loss where a closure computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for alike in self._alike(group):
                self.update(group, alike)
                for parameter in alike.parameters:
                    if is_sharded(parameter):  # a write to what lies here is none to the tensor
                        torch.autograd.graph.increment_version(parameter)
        return loss

    def update(self, group: Group, alike: Alike) -> None:
        """Change the weights and states of some parameters of a group in place."""
        raise NotImplementedError

    def adapted(self, group: Group, alike: Alike) -> list[int]:
        """The places of the parameters whose update is scaled by norms: all, or those with two dimensions or more."""
        return [i for i, p in enumerate(alike.parameters) if group["adapt"] == "all" or p.dim() > 1]

    def _alike(self, group: Group) -> Iterator[Alike]:
        found: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._begin(parameter)
                kind = parameter.device, parameter.dtype, parameter.grad.dtype
                found.setdefault(kind, []).append(parameter)
        for parameters in found.values():
            yield Alike(
                parameters=parameters,
                weights=local(parameters),
                gradients=local(p.grad for p in parameters if p.grad is not None),
                states={name: local(self.state[p][name] for p in parameters) for name in self.moments},
            )

    def _begin(self, parameter: Tensor) -> None:
        gradient, name = parameter.grad, type(self).__name__
        if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
            what = f"{name}: a gradient that is {'sparse' if gradient.is_sparse else 'complex'}"
            raise SettingError(message(what, want="dense real gradients", fix="another optimizer for this parameter"))
        state = self.state[parameter]
        for moment in self.moments:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def norms(tensors: list[Tensor], of: list[Tensor]) -> Tensor:
    """The 2-norms of tensors in one, in float32 at least; `of`: the parameters whose parts, lying here, they may be."""
    dtype = torch.float32 if tensors[0].dtype in _REDUCED else None
    return joined_norms(torch.stack(torch._foreach_norm(tensors, 2, dtype)), of)


def scaled(updates: list[Tensor], places: list[int], ratios: Tensor) -> None:
    """Put the updates at these places, each multiplied by its ratio, in their stead."""
    for place, update in zip(places, torch._foreach_mul([updates[i] for i in places], ratios.unbind()), strict=True):
        updates[place] = update
