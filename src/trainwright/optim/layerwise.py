"""`Lars` and `Lamb`: optimizers for large batches, which scale the update of each layer by a ratio of norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.checks import check_choice, check_number
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.modules.dtensors import global_norms, is_sharded, local_shards
from trainwright.optim.fused import ParamGroup
from trainwright.optim.optimizers import checked_betas

CHOICES = ("weights", "all")
_REDUCED = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Parameters of one device and dtype with their gradients and states, for foreach kernels.

    For a sharded parameter, weights, gradients and states are the local shards and are changed in place.
    """

    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    states: dict[str, list[Tensor]]


class LayerwiseOptimizer(Optimizer):
    """Base class of both; `group["adapt"]` selects the parameters whose update is scaled by norms."""

    moments: tuple[str, ...] = ()
    """Names of the states with the shape of their parameter, which start at zero."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a parameter group; SettingError for an invalid setting."""
        super().add_param_group(param_group)
        self.check(param_group)

    def check(self, group: ParamGroup) -> None:
        """Raise SettingError for an invalid setting of a group."""
        owner = type(self).__name__
        for name in ("lr", "weight_decay"):
            check_number(group[name], f"{owner}({name}={group[name]!r})", least=0)
        check_choice(group["adapt"], owner, "adapt", choices=CHOICES)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self._batches(group):
                self.update(group, batch)
                for parameter in batch.parameters:
                    if is_sharded(parameter):  # a write to the local shard does not increase the DTensor's version
                        torch.autograd.graph.increment_version(parameter)
        return loss

    def update(self, group: ParamGroup, batch: TensorBatch) -> None:
        """Update weights and states of a batch of parameters in place."""
        raise NotImplementedError

    def adapted(self, group: ParamGroup, batch: TensorBatch) -> list[int]:
        """Return the indices of the parameters whose update is scaled: all, or those with at least two dimensions."""
        return [i for i, p in enumerate(batch.parameters) if group["adapt"] == "all" or p.dim() > 1]

    def _batches(self, group: ParamGroup) -> Iterator[TensorBatch]:
        alike: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._begin(parameter)
                kind = parameter.device, parameter.dtype, parameter.grad.dtype
                alike.setdefault(kind, []).append(parameter)
        for parameters in alike.values():
            yield TensorBatch(
                parameters=parameters,
                weights=local_shards(parameters),
                gradients=local_shards(p.grad for p in parameters if p.grad is not None),
                states={name: local_shards(self.state[p][name] for p in parameters) for name in self.moments},
            )

    def _begin(self, parameter: Tensor) -> None:
        gradient, name = parameter.grad, type(self).__name__
        if gradient is not None and (gradient.is_sparse or gradient.is_complex()):
            what = f"{name}: a gradient that is {'sparse' if gradient.is_sparse else 'complex'}"
            raise SettingError(what, want="dense real gradients", fix="another optimizer for this parameter")
        state = self.state[parameter]
        for moment in self.moments:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def norms(tensors: list[Tensor], of: list[Tensor]) -> Tensor:
    """Return the 2-norms of tensors, in one tensor of at least float32. `of`: their parameters, for sharded tensors."""
    dtype = torch.float32 if tensors[0].dtype in _REDUCED else None
    return global_norms(torch.stack(torch._foreach_norm(tensors, 2, dtype)), of)


def scaled(updates: list[Tensor], indices: list[int], ratios: Tensor) -> None:
    """Replace the updates at these indices in the list by themselves times their ratios."""
    for index, update in zip(indices, torch._foreach_mul([updates[i] for i in indices], ratios.unbind()), strict=True):
        updates[index] = update


@suggests
class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments for large batches: LAMB (You et al., arXiv 1904.00962, algorithm 2).

    For the weights w of one layer, with gradient g, weight decay b, and step count t::

        m <- beta1 * m + (1 - beta1) * g             mhat = m / (1 - beta1**t)
        v <- beta2 * v + (1 - beta2) * g**2          vhat = v / (1 - beta2**t)
        u = mhat / (sqrt(vhat) + eps) + b * w
        w <- w - lr * phi(|w|) / |u| * u             # a factor 1 where phi(|w|) or |u| is 0

    phi is the identity, or a clamp to `clamp`. Each parameter group may set each argument; `param_groups` makes groups
    without weight decay for biases and normalization layers. Foreach kernels make the steps; gradients are not changed.

    Args:
        params: Parameters or groups.
        lr: The learning rate.
        betas: The decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: The weight decay b.
        bias_correction: Whether to correct the bias of the moments. False: mhat = m and vhat = v, as in the third
            version of the paper.
        clamp: `(low, high)`: phi(z) = min(max(z, low), high).
        adapt: "weights" scales the updates of parameters with at least two dimensions; the others are updated as by
            AdamW with the decay inside the update. "all" scales all updates, as in the paper.
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

    def check(self, group: ParamGroup) -> None:
        """Raise SettingError for an invalid setting of a group."""
        super().check(group)
        checked_betas("Lamb", group["betas"])
        check_number(group["eps"], f"Lamb(eps={group['eps']!r})", least=0)
        check_choice(group["bias_correction"], "Lamb", "bias_correction", choices=(True, False))
        clamp = group["clamp"]
        if clamp is None:
            return
        written = f"Lamb(clamp={clamp!r})"
        if not isinstance(clamp, tuple | list) or len(clamp) != 2:
            raise SettingError(written, want="two numbers or None", fix="clamp=(0, 10)")
        check_number(clamp[0], written, least=0)
        check_number(clamp[1], written, above=clamp[0])

    def update(self, group: ParamGroup, batch: TensorBatch) -> None:
        """Update weights and moments of a batch of parameters in place."""
        beta1, beta2 = group["betas"]
        first, second = (batch.states[name] for name in self.moments)
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, batch.gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, batch.gradients, batch.gradients, value=1 - beta2)
        steps = self._counted(batch)
        below = torch._foreach_sqrt(second)
        if group["bias_correction"]:
            torch._foreach_div_(below, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["eps"])
        updates = list(torch._foreach_div(first, below))
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_add_(updates, batch.weights, alpha=group["weight_decay"])
        indices = self.adapted(group, batch)
        if indices:
            scaled(updates, indices, self._ratios(group, batch, indices=indices, updates=updates))
        torch._foreach_add_(batch.weights, updates, alpha=-group["lr"])

    def _counted(self, batch: TensorBatch) -> list[float]:
        """Increment and return the step count of each parameter."""
        states = [self.state[parameter] for parameter in batch.parameters]
        for state in states:
            state["step"] = state.get("step", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
        return [state["step"].item() for state in states]

    def _ratios(self, group: ParamGroup, batch: TensorBatch, *, indices: list[int], updates: list[Tensor]) -> Tensor:
        of = [batch.parameters[i] for i in indices]
        weights = norms([batch.weights[i] for i in indices], of)
        if group["clamp"] is not None:
            weights = weights.clamp(*group["clamp"])
        lengths = norms([updates[i] for i in indices], of)
        return torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)


@suggests
class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling for large batches: LARS (You et al., arXiv 1708.03888, algorithm 1).

    For the weights w of one layer, with gradient g, weight decay b, momentum m and trust coefficient eta::

        ratio = eta * |w| / (|g| + b * |w|)          # 1 where |w| or the denominator is 0
        v <- m * v + ratio * (g + b * w)
        w <- w - lr * v

    The learning rate is applied outside of v, as in torch's SGD. The paper applies it inside of v
    (v <- m * v + lr * ratio * ...): the results are equal for a constant rate; after a change of the rate, the update
    here follows at once. Each parameter group may set each argument; `param_groups` makes groups without weight decay
    for biases and normalization layers. Foreach kernels make the steps; gradients are not changed.

    Args:
        params: Parameters or groups.
        lr: The learning rate.
        momentum: The momentum m.
        weight_decay: The weight decay b.
        trust: The trust coefficient eta.
        nesterov: Whether to use Nesterov momentum: the update is ratio * (g + b * w) + m * v.
        adapt: "weights" scales the updates of parameters with at least two dimensions; the others are updated as by
            SGD. "all" scales all updates, as in the paper.
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

    def check(self, group: ParamGroup) -> None:
        """Raise SettingError for an invalid setting of a group."""
        super().check(group)
        check_number(group["momentum"], f"Lars(momentum={group['momentum']!r})", least=0, below=1)
        check_number(group["trust"], f"Lars(trust={group['trust']!r})", above=0)
        check_choice(group["nesterov"], "Lars", "nesterov", choices=(True, False))
        if group["nesterov"] and not group["momentum"]:
            raise SettingError("Lars(nesterov=True, momentum=0)", want="a momentum", fix="momentum=0.9")

    def update(self, group: ParamGroup, batch: TensorBatch) -> None:
        """Update weights and momentum of a batch of parameters in place."""
        decay, momentum = group["weight_decay"], group["momentum"]
        updates = list(torch._foreach_add(batch.gradients, batch.weights, alpha=decay)) if decay else batch.gradients[:]
        indices = self.adapted(group, batch)
        if indices:
            scaled(updates, indices, self._ratios(group, batch, indices=indices))
        if momentum:
            velocity = batch.states["momentum_buffer"]
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, updates)
            nesterov = group["nesterov"]
            updates = list(torch._foreach_add(updates, velocity, alpha=momentum)) if nesterov else velocity
        torch._foreach_add_(batch.weights, updates, alpha=-group["lr"])

    def _ratios(self, group: ParamGroup, batch: TensorBatch, *, indices: list[int]) -> Tensor:
        of = [batch.parameters[i] for i in indices]
        weights = norms([batch.weights[i] for i in indices], of)
        below = norms([batch.gradients[i] for i in indices], of) + group["weight_decay"] * weights
        return torch.where((weights > 0) & (below > 0), group["trust"] * weights / below, 1.0)
