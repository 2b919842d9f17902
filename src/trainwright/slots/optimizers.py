"""Optimizers with their parameter groups: which weights decay, which rate each part of a model has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _foreach_utils

from trainwright.base.errors import SettingError, message
from trainwright.runtime.fused import spoiled_by_sgd
from trainwright.runtime.matching import find
from trainwright.slots.schedule_lengths import check_number

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's normalisation layers that have parameters: batch, instance, layer, group and RMS normalisation."""


def adamw(
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lrs: Mapping[str, float] | None = None,
    fused: bool | Literal["auto"] = "auto",
) -> Callable[[nn.Module], torch.optim.AdamW]:
    """Return a function of a model that makes its `torch.optim.AdamW`, with named groups.

    Weights decay, those of embeddings too. Biases and all other parameters with fewer than two dimensions do not, nor
    do parameters of normalisation layers. Frozen parameters are given as well: they wait in their group, without a
    step, until they are unfrozen. A tied parameter is given once.

    `lrs={"backbone": 1e-4}` gives a submodule, or the parameters that a glob means ("*.bias"), a rate of their own;
    where several match, the longest wins (wildcards do not count). `fused="auto"` uses torch's fused kernels where all
    parameters are floating point on devices that have them, the CPU included. SettingError for a setting that cannot
    work, and for a name in `lrs` without a parameter to hold for.
    """
    return GroupedAdamW(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, lrs=lrs, fused=fused)


def fused_for(optimizer: Any, model: nn.Module) -> dict[str, bool]:
    """The keyword that has a torch class, or a partial of one, make a fused optimizer for `model`, where it can.

    Nothing is added where the partial says `fused`, `foreach` or `differentiable` itself, or gradients are sparse.
    """
    target, said = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    silent = not {"fused", "foreach", "differentiable"} & set(said) and not getattr(optimizer, "args", ())
    known = target.__module__.startswith("torch.optim.") and "fused" in inspect.signature(target).parameters
    dense = not any(getattr(module, "sparse", False) is True for module in model.modules())
    return {"fused": True} if silent and known and dense and _serves(target, model.parameters()) else {}


def could_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of torch's own was left to choose its way, and torch's fused kernels would serve it."""
    target, groups = type(optimizer), optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    open_ = all(
        group.get("fused", False) is None and group.get("foreach", False) is None and not group.get("differentiable")
        for group in groups
    )
    return open_ and target.__module__.startswith("torch.optim.") and _serves(target, parameters)


def _serves(target: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the fused kernels of this class of torch's serve all of these.

    Adagrad's is for the CPU alone up to 2.11, and SGD's is wrong there for reduced precision up to 2.13.
    """
    found = list(parameters)
    if target is torch.optim.SGD and spoiled_by_sgd(found) is not None:
        return False
    elsewhere = target is torch.optim.Adagrad and any(p.device.type != "cpu" for p in found)
    return bool(found) and not elsewhere and has_fused(found)


@dataclass(frozen=True, kw_only=True)
class GroupedAdamW:
    """What `adamw` gives: makes the optimizer of a model when it is called with it."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    lrs: Mapping[str, float] | None
    fused: bool | Literal["auto"]

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            value = getattr(self, name)
            check_number(value, f"adamw({name}={value!r})", least=0)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise SettingError(message(f"adamw(betas={self.betas!r})", want="two numbers", fix="betas=(0.9, 0.999)"))
        for beta in self.betas:
            check_number(beta, f"adamw(betas={self.betas!r})", least=0, below=1)
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))  # torch takes no integers here
        if self.lrs is not None:
            object.__setattr__(self, "lrs", _checked_rates(self.lrs))
        if self.fused != "auto" and not isinstance(self.fused, bool):
            raise SettingError(message(f"adamw(fused={self.fused!r})", want='"auto", True or False'))

    def __repr__(self) -> str:
        names = ("lr", "weight_decay", "betas", "eps", "lrs", "fused")
        return f"adamw({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __call__(self, model: nn.Module) -> torch.optim.AdamW:
        """Group the model's parameters, and make the optimizer."""
        named = _parameters(model)
        fused = has_fused(named.values()) if self.fused == "auto" else self.fused
        return torch.optim.AdamW(
            list(self._groups(model, named)), lr=self.lr, betas=self.betas, eps=self.eps, fused=fused
        )

    def _groups(self, model: nn.Module, named: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Any]]:
        """Those of the common rate first, for the first group's rate is reported as `lr`; none is empty.

        Both kinds are apart without weight decay too, so that a checkpoint fits whatever the decay is.
        """
        keys = _keys_of(model, self.lrs or {})
        still = _without_decay(model, named.values())
        for key in (None, *(self.lrs or {})):
            mine = {name: parameter for name, parameter in named.items() if keys.get(parameter) == key}
            for decays in (True, False):
                members = [(name, p) for name, p in mine.items() if (p not in still) == decays]
                if members:
                    yield {
                        "params": members,
                        "name": ("" if key is None else f"{key}.") + ("decay" if decays else "no_decay"),
                        "lr": self.lr if key is None or self.lrs is None else self.lrs[key],
                        "weight_decay": self.weight_decay if decays else 0.0,
                    }


def _checked_rates(lrs: Any) -> dict[str, float]:
    if not isinstance(lrs, Mapping) or not all(isinstance(key, str) for key in lrs):
        raise SettingError(
            message(f"adamw(lrs={lrs!r})", want="a dict of names and rates", fix='lrs={"backbone": 1e-4}')
        )
    for key, rate in lrs.items():
        check_number(rate, f"adamw(lrs={{{key!r}: {rate!r}}})", least=0)
    return dict(lrs)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    if not named:
        raise SettingError(message(f"adamw: {type(model).__name__} has no parameters", want="a model to train"))
    if lazy := [name for name, parameter in named.items() if is_lazy(parameter)]:
        raise SettingError(
            message(
                f"adamw: {lazy[0]!r} has no shape yet, so that nobody knows whether it decays",
                fix="call model(one_batch) once before the optimizer is made",
            )
        )
    return named


def _keys_of(model: nn.Module, lrs: Mapping[str, float]) -> dict[nn.Parameter, str]:
    """For each parameter the name in `lrs` that holds for it; SettingError for a name that holds for none."""
    matches: dict[nn.Parameter, list[str]] = {}
    for key in lrs:
        for parameter in find(model, key, f"adamw(lrs={{{key!r}: ...}})").parameters.values():
            matches.setdefault(parameter, []).append(key)
    chosen = {parameter: _longest(keys, lrs) for parameter, keys in matches.items()}
    for key in lrs:
        if key not in chosen.values():
            why = "other names hold for all of its parameters" if any(key in m for m in matches.values()) else ""
            raise SettingError(
                message(
                    f"adamw(lrs={{{key!r}: ...}}): {why or 'it has no parameters'}", fix=f"leave {key!r} out of lrs"
                )
            )
    return chosen


def _longest(keys: list[str], lrs: Mapping[str, float]) -> str:
    first, *others = sorted(keys, key=_length, reverse=True)
    for other in others:
        if _length(other) == _length(first) and lrs[other] != lrs[first]:
            raise SettingError(
                message(
                    f"adamw(lrs=...): {first!r} and {other!r} are equally long and mean one parameter",
                    have=f"{lrs[first]:g} and {lrs[other]:g}",
                    want="a longer name for the one that shall win",
                )
            )
    return first


def _length(key: str) -> int:
    return len(re.sub(r"\[.*?\]|[*?]", "", key))


def _without_decay(model: nn.Module, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Parameters with fewer than two dimensions, and all that lie in normalisation layers."""
    norms = {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    return norms | {p for p in parameters if p.dim() < 2}


def has_fused(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch's fused kernels serve all of these; False for a torch that does not say where it has them."""
    listed = getattr(_foreach_utils, "_get_fused_kernels_supported_devices", None)
    devices = listed() if listed is not None else ()
    return all(not is_lazy(p) and p.is_floating_point() and p.device.type in devices for p in parameters)
