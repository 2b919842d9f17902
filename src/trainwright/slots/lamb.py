"""LAMB: AdamW whose step is, for each layer, as long as its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.base.checks import check_choice, check_number
from trainwright.base.errors import SettingError, message
from trainwright.base.names import suggests
from trainwright.slots.layerwise import Alike, Group, LayerwiseOptimizer, norms, scaled
from trainwright.slots.optimizers import checked_betas


@suggests
class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments, for large batches (You et al.: arXiv 1904.00962, algorithm 2).

    For the weights w of one layer, with gradient g in its t-th step, weight decay b::

        m <- beta1 * m + (1 - beta1) * g             mhat = m / (1 - beta1**t)
        v <- beta2 * v + (1 - beta2) * g**2          vhat = v / (1 - beta2**t)
        u = mhat / (sqrt(vhat) + eps) + b * w
        w <- w - lr * phi(|w|) / |u| * u             # a factor 1 where phi(|w|) or |u| is 0

    phi is the identity; with `clamp=(low, high)` it is min(max(z, low), high). Without `bias_correction` mhat and vhat
    are m and v, as in the third version of the paper.

    With `adapt="weights"` the factor is for parameters with two dimensions or more, and biases and norms are stepped as
    by AdamW with its decay inside the update; "all" has it for every parameter, as in the paper. Groups may set each of
    these; `param_groups` gives such without decay for biases and norms. Steps are made by foreach kernels; gradients
    stay as they are.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        clamp: tuple[float, float] | None = None,
        adapt: Literal["weights", "all"] = "weights",
    ) -> None:
        defaults = {"lr": lr, "betas": checked_betas("Lamb", betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction, "clamp": clamp, "adapt": adapt})

    def check(self, group: Group) -> None:
        """Refuse settings of a group that cannot work."""
        super().check(group)
        checked_betas("Lamb", group["betas"])
        check_number(group["eps"], f"Lamb(eps={group['eps']!r})", least=0)
        check_choice(group["bias_correction"], "Lamb", "bias_correction", choices=(True, False))
        clamp = group["clamp"]
        if clamp is None:
            return
        written = f"Lamb(clamp={clamp!r})"
        if not isinstance(clamp, tuple | list) or len(clamp) != 2:
            raise SettingError(message(written, want="two numbers or None", fix="clamp=(0, 10)"))
        check_number(clamp[0], written, least=0)
        check_number(clamp[1], written, above=clamp[0])

    def update(self, group: Group, alike: Alike) -> None:
        """Change the weights and the moments of some parameters in place."""
        beta1, beta2 = group["betas"]
        first, second = (alike.states[name] for name in self.moments)
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, alike.gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, alike.gradients, alike.gradients, value=1 - beta2)
        steps = self._counted(alike)
        below = torch._foreach_sqrt(second)
        if group["bias_correction"]:
            torch._foreach_div_(below, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["eps"])
        updates = list(torch._foreach_div(first, below))
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_add_(updates, alike.weights, alpha=group["weight_decay"])
        places = self.adapted(group, alike)
        if places:
            scaled(updates, places, self._ratios(group, alike, places=places, updates=updates))
        torch._foreach_add_(alike.weights, updates, alpha=-group["lr"])

    def _counted(self, alike: Alike) -> list[float]:
        """The number of each parameter's step."""
        states = [self.state[parameter] for parameter in alike.parameters]
        for state in states:
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
        return [state["step"].item() for state in states]

    def _ratios(self, group: Group, alike: Alike, *, places: list[int], updates: list[Tensor]) -> Tensor:
        of = [alike.parameters[i] for i in places]
        weights = norms([alike.weights[i] for i in places], of)
        if group["clamp"] is not None:
            weights = weights.clamp(*group["clamp"])
        lengths = norms([updates[i] for i in places], of)
        return torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
