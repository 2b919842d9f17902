"""LARS: SGD with momentum whose step is, for each layer, as long as its weights allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.base.checks import check_choice, check_number
from trainwright.base.errors import SettingError, message
from trainwright.base.names import suggests
from trainwright.slots.layerwise import Alike, Group, LayerwiseOptimizer, norms, scaled


@suggests
class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling, for large batches (You, Gitman, Ginsburg: arXiv 1708.03888, algorithm 1).

    For the weights w of one layer, with gradient g, weight decay b, momentum m and trust coefficient eta::

        ratio = eta * |w| / (|g| + b * |w|)          # 1 where |w| or the denominator is 0
        v <- m * v + ratio * (g + b * w)
        w <- w - lr * v

    The rate stands outside of v, as in torch's SGD. The paper has it inside (v <- m * v + lr * ratio * ...): the same
    while the rate stays; after a change, v here follows at once. `nesterov` steps by ratio * (g + b * w) + m * v.

    With `adapt="weights"` the ratio is for parameters with two dimensions or more, and biases and norms are stepped as
    by SGD; "all" has it for every parameter, as in the paper. Groups may set each of these; `param_groups` gives such
    without decay for biases and norms. Steps are made by foreach kernels; gradients stay as they are.
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        nesterov: bool = False,
        adapt: Literal["weights", "all"] = "weights",
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults | {"nesterov": nesterov, "adapt": adapt})

    def check(self, group: Group) -> None:
        """Refuse settings of a group that cannot work."""
        super().check(group)
        check_number(group["momentum"], f"Lars(momentum={group['momentum']!r})", least=0, below=1)
        check_number(group["trust"], f"Lars(trust={group['trust']!r})", above=0)
        check_choice(group["nesterov"], "Lars", "nesterov", choices=(True, False))
        if group["nesterov"] and not group["momentum"]:
            raise SettingError(message("Lars(nesterov=True, momentum=0)", want="a momentum", fix="momentum=0.9"))

    def update(self, group: Group, alike: Alike) -> None:
        """Change the weights and the momentum of some parameters in place."""
        decay, momentum = group["weight_decay"], group["momentum"]
        updates = list(torch._foreach_add(alike.gradients, alike.weights, alpha=decay)) if decay else alike.gradients[:]
        places = self.adapted(group, alike)
        if places:
            scaled(updates, places, self._ratios(group, alike, places=places))
        if momentum:
            velocity = alike.states["momentum_buffer"]
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, updates)
            nesterov = group["nesterov"]
            updates = list(torch._foreach_add(updates, velocity, alpha=momentum)) if nesterov else velocity
        torch._foreach_add_(alike.weights, updates, alpha=-group["lr"])

    def _ratios(self, group: Group, alike: Alike, *, places: list[int]) -> Tensor:
        of = [alike.parameters[i] for i in places]
        weights = norms([alike.weights[i] for i in places], of)
        below = norms([alike.gradients[i] for i in places], of) + group["weight_decay"] * weights
        return torch.where((weights > 0) & (below > 0), group["trust"] * weights / below, 1.0)
