"""`adamw`, `sgd`, `muon` and `param_groups`: optimizers for a model with named parameter groups, fused if supported."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer

from trainwright.core.checks import check_choice, check_number
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import NormWithStatistics, devices_with_fused_kernels
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.matching import find
from trainwright.optim.fused import ParamGroup, dtype_broken_in_sgd, step_of

Fused = bool | Literal["auto"]
Inner = tuple[Optimizer, Callable[[], Any]]
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@suggests
def adamw(
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lrs: Mapping[str, float] | None = None,
    no_decay: str | Sequence[str] = (),
    layer_decay: float | None = None,
    layers: str | Sequence[str] = (),
    fused: Fused = "auto",
) -> Callable[[nn.Module], torch.optim.AdamW]:
    """Return a function that makes `torch.optim.AdamW` for a model, with named parameter groups.

    Args:
        lr: The learning rate.
        weight_decay: The weight decay; 0 for biases and normalization layers, as in `param_groups`.
        betas: As in torch.
        eps: As in torch.
        lrs: Learning rates by name, as in `param_groups`.
        no_decay: Names of parameters without weight decay, as in `param_groups`.
        layer_decay: The factor of the learning rate per layer, as in `param_groups`.
        layers: Names of layers, as in `param_groups`.
        fused: Whether to use torch's fused kernels. "auto": if all parameters are floating point, on devices with
            fused kernels, which include the CPU.

    Raises:
        SettingError: For invalid settings.
    """
    groups = Groups(
        lr=lr,
        weight_decay=weight_decay,
        lrs=lrs,
        no_decay=no_decay,
        layer_decay=layer_decay,
        layers=layers,
        owner="adamw",
    )
    settings = {"betas": checked_betas("adamw", betas), "eps": eps}
    check_number(eps, f"adamw(eps={eps!r})", least=0)
    return TorchFactory(kind=torch.optim.AdamW, groups=groups, settings=settings, fused=fused)


@suggests
def sgd(
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    lrs: Mapping[str, float] | None = None,
    no_decay: str | Sequence[str] = (),
    layer_decay: float | None = None,
    layers: str | Sequence[str] = (),
    fused: Fused = "auto",
) -> Callable[[nn.Module], torch.optim.SGD]:
    """Return a function that makes `torch.optim.SGD` for a model, with momentum and named parameter groups.

    Args:
        lr: The learning rate.
        momentum: As in torch.
        weight_decay: The weight decay; 0 for biases and normalization layers, as in `param_groups`.
        nesterov: As in torch.
        lrs: Learning rates by name, as in `param_groups`.
        no_decay: Names of parameters without weight decay, as in `param_groups`.
        layer_decay: The factor of the learning rate per layer, as in `param_groups`.
        layers: Names of layers, as in `param_groups`.
        fused: Whether to use torch's fused kernels. "auto": if they support all parameters, which excludes bfloat16
            and float16 on the CPU, where the kernel is wrong.

    Raises:
        SettingError: For invalid settings.
    """
    groups = Groups(
        lr=lr,
        weight_decay=weight_decay,
        lrs=lrs,
        no_decay=no_decay,
        layer_decay=layer_decay,
        layers=layers,
        owner="sgd",
    )
    check_number(momentum, f"sgd(momentum={momentum!r})", least=0)
    if not isinstance(nesterov, bool) or (nesterov and not momentum):
        have = f"nesterov={nesterov!r}, momentum={momentum!r}"
        raise SettingError("sgd(nesterov=...)", have=have, want="True with a momentum, or False")
    return TorchFactory(
        kind=torch.optim.SGD, groups=groups, settings={"momentum": momentum, "nesterov": nesterov}, fused=fused
    )


@suggests
def muon(
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    adamw_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    others: str | Sequence[str] | None = None,
    lrs: Mapping[str, float] | None = None,
    no_decay: str | Sequence[str] = (),
    layer_decay: float | None = None,
    layers: str | Sequence[str] = (),
    fused: Fused = "auto",
) -> Callable[[nn.Module], MuonAdamW]:
    """Return a function that makes one optimizer for a model: `torch.optim.Muon` for hidden layers, AdamW for the rest.

    Muon orthogonalizes the update of the weight matrix of a hidden layer
    (https://kellerjordan.github.io/posts/muon/). It trains the two-dimensional weights, except embeddings and `others`;
    AdamW trains all other parameters. Groups are those of `param_groups`, each split in two. Requires torch 2.9.

    Args:
        lr: The learning rate of Muon, and of AdamW if `adamw_lr` is None.
        weight_decay: The weight decay.
        momentum: The momentum of Muon.
        nesterov: As in torch.
        adjust_lr: "match_rms_adamw" scales Muon's updates to the RMS of AdamW's (arXiv 2502.16982), so that both use
            one learning rate. "original" is the scaling of the page above, and requires `adamw_lr`.
        adamw_lr: The learning rate of AdamW.
        betas: The betas of AdamW.
        others: Names of matrices that AdamW trains: the output layer, and any other matrix outside of hidden layers.
            None: the last `nn.Linear` that the model defines. `()`: no matrix.
        lrs: Learning rates by name, as in `param_groups`.
        no_decay: Names of parameters without weight decay, as in `param_groups`.
        layer_decay: The factor of the learning rate per layer, as in `param_groups`.
        layers: Names of layers, as in `param_groups`.
        fused: Whether AdamW uses torch's fused kernels. "auto": if they support all of its parameters.

    Raises:
        SettingError: For invalid settings, and for a torch without Muon.
    """
    groups = Groups(
        lr=lr,
        weight_decay=weight_decay,
        lrs=lrs,
        no_decay=no_decay,
        layer_decay=layer_decay,
        layers=layers,
        owner="muon",
    )
    return MuonFactory(
        groups=groups,
        momentum=momentum,
        nesterov=nesterov,
        adjust_lr=adjust_lr,
        adamw_lr=adamw_lr,
        betas=checked_betas("muon", betas),
        others=others,
        fused=fused,
    )


def fused_for(optimizer: Any, model: nn.Module) -> dict[str, bool]:
    """Return `{"fused": True}` if a torch class, or a partial of one, supports it for `model`; else an empty dict.

    Empty too if the partial sets `fused`, `foreach` or `differentiable`, or if gradients are sparse.
    """
    target = optimizer
    if isinstance(optimizer, partial):
        if optimizer.args or not {"fused", "foreach", "differentiable"}.isdisjoint(optimizer.keywords):
            return {}
        target = optimizer.func
    if not target.__module__.startswith("torch.optim.") or "fused" not in inspect.signature(target).parameters:
        return {}
    return {"fused": True} if _supports_fused_for(target, model) else {}


def could_be_fused(optimizer: Optimizer) -> bool:
    """Return whether fused kernels support a torch optimizer whose implementation (`fused`, `foreach`) is not set."""
    target, groups = type(optimizer), optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    open_ = all(
        group.get("fused", False) is None and group.get("foreach", False) is None and not group.get("differentiable")
        for group in groups
    )
    return open_ and target.__module__.startswith("torch.optim.") and supports_fused(target, parameters)


def supports_fused(target: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the fused kernels of this torch class support all of these parameters.

    Adagrad's kernel is CPU-only up to torch 2.11. SGD's CPU kernel is wrong in reduced precision up to 2.13. Only those
    of Adam and AdamW support sharded parameters. False for a torch that does not list the devices of fused kernels.
    """
    listed = list(parameters)
    if target not in (torch.optim.Adam, AdamW) and is_sharded(*listed):
        return False
    if not listed or (target is torch.optim.SGD and dtype_broken_in_sgd(listed) is not None):
        return False
    devices = set(devices_with_fused_kernels())
    if target is torch.optim.Adagrad:
        devices &= {"cpu"}
    return all(not is_lazy(p) and p.is_floating_point() and p.device.type in devices for p in listed)


def _supports_fused_for(target: Any, model: nn.Module) -> bool:
    """Return whether all gradients of a model are dense and the fused kernels of this torch class support it."""
    is_dense = not any(getattr(module, "sparse", False) is True for module in model.modules())
    return is_dense and supports_fused(target, model.parameters())


class OptimizerFactory:
    """Base class of the functions that make an optimizer for a model; the trainer calls them with the module."""

    groups: Groups

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model, with its parameters in groups."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the public function that returned this object, such as "adamw"."""
        return self.groups.owner


@dataclass(frozen=True, kw_only=True)
class TorchFactory(OptimizerFactory):
    """Makes a torch optimizer for a model. Returned by `adamw` and `sgd`."""

    kind: type[Any]
    groups: Groups
    settings: Mapping[str, Any]
    fused: Fused

    def __post_init__(self) -> None:
        check_fused(self.name, self.fused)

    def __repr__(self) -> str:
        given = {"lr": self.groups.lr, "weight_decay": self.groups.weight_decay, **self.settings}
        settings = [*(f"{name}={value!r}" for name, value in given.items()), *self.groups.as_code()]
        return f"{self.name}({', '.join(settings)}, fused={self.fused!r})"

    def __call__(self, model: nn.Module) -> Any:
        """Return the optimizer of a model, with its parameters in groups."""
        groups = self.groups.of(model)
        fused = _supports_fused_for(self.kind, model) if self.fused == "auto" else self.fused
        return self.kind(groups, lr=self.groups.lr, **self.settings, fused=fused)


class MuonAdamW(Optimizer):
    """One optimizer of two algorithms: a group's `by` selects `torch.optim.Muon` or `torch.optim.AdamW`.

    A group may hold any setting of its algorithm; the others have their defaults. Both share one list of groups, one
    state and one schedule. SettingError for a torch before 2.9, which has no Muon.
    """

    def __init__(self, params: Iterable[ParamGroup], lr: float = 1e-3) -> None:
        super().__init__(list(params), {"lr": lr, "differentiable": False})  # as after every `load_state_dict`

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a parameter group; its `by` is "muon" or "adamw"."""
        by = param_group.get("by")
        if by not in ("muon", "adamw"):
            raise SettingError(f"a group with by={by!r}", want='"muon" or "adamw"', fix='{..., "by": "adamw"}')
        super().add_param_group(param_group)
        _kind(by)([param_group])  # torch's constructor sets the defaults and checks the parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both algorithms; return the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for by in ("muon", "adamw"):
            groups = [group for group in self.param_groups if group["by"] == by]
            if groups:
                inner, step = self._inner(by, groups)
                inner.param_groups, inner.state = groups, self.state  # `load_state_dict` replaces them
                step()
        return loss

    def _inner(self, by: str, groups: list[ParamGroup]) -> Inner:
        """Return torch's optimizer of these groups and its step, which are made once and not copied or pickled."""
        made: dict[str, Inner] = vars(self).setdefault("_made", {})
        if by not in made:
            inner = _kind(by)(groups)
            made[by] = inner, step_of(inner)
        return made[by]


@dataclass(frozen=True, kw_only=True)
class MuonFactory(OptimizerFactory):
    """Makes a `MuonAdamW` for a model. Returned by `muon`."""

    groups: Groups
    momentum: float
    nesterov: bool
    adjust_lr: str
    adamw_lr: float | None
    betas: tuple[float, float]
    others: str | Sequence[str] | None
    fused: Fused

    def __post_init__(self) -> None:
        _kind("muon")
        check_number(self.momentum, f"muon(momentum={self.momentum!r})", least=0, below=1)
        check_choice(self.nesterov, "muon", "nesterov", choices=(True, False))
        check_choice(self.adjust_lr, "muon", "adjust_lr", choices=("match_rms_adamw", "original"))
        check_fused("muon", self.fused)
        check_number(self.groups.lr, f"muon(lr={self.groups.lr!r})", above=0)
        if self.adamw_lr is not None:
            check_number(self.adamw_lr, f"muon(adamw_lr={self.adamw_lr!r})", least=0)
        elif self.adjust_lr == "original":
            what = 'muon(adjust_lr="original"): its rate is no rate for AdamW, which trains the other parameters'
            raise SettingError(what, fix='muon(lr=0.02, adjust_lr="original", adamw_lr=3e-4)')
        if self.others is not None:
            object.__setattr__(self, "others", checked_names("muon", "others", self.others))

    def __repr__(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "groups"]
        given = [f"lr={self.groups.lr!r}", f"weight_decay={self.groups.weight_decay!r}", *self.groups.as_code(), *own]
        return f"muon({', '.join(given)})"

    def __call__(self, model: nn.Module) -> MuonAdamW:
        """Return the optimizer of a model, with its parameters in groups."""
        groups, hidden = self.groups.of(model), self._hidden(model)
        rest = [p for p in model.parameters() if p not in hidden]
        fused = supports_fused(AdamW, rest) if self.fused == "auto" else self.fused
        return MuonAdamW([part for group in groups for part in self._split(group, hidden, fused)], lr=self.groups.lr)

    def _split(self, group: ParamGroup, hidden: set[nn.Parameter], fused: bool) -> Iterator[ParamGroup]:
        """Yield the Muon part of a group, then its AdamW part; empty parts are left out."""
        factor = 1.0 if self.adamw_lr is None else self.adamw_lr / self.groups.lr
        settings: dict[str, ParamGroup] = {
            "muon": {"momentum": self.momentum, "nesterov": self.nesterov, "adjust_lr_fn": self.adjust_lr},
            "adamw": {"betas": self.betas, "fused": fused, "lr": group["lr"] * factor},
        }
        for by, own in settings.items():
            members = [(name, p) for name, p in group["params"] if (p in hidden) == (by == "muon")]
            if members:
                yield group | {"params": members, "name": f"{group['name']}.{by}", "by": by} | own

    def _hidden(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the weight matrices of hidden layers; SettingError if there are none."""
        embeddings = {m.weight for m in model.modules() if isinstance(m, EMBEDDINGS)}
        matrices = {p for p in model.parameters() if p.dim() == 2 and p.is_floating_point()}
        hidden = matrices - embeddings - self._others(model)
        if not hidden:
            raise SettingError(
                f"muon: {type(model).__name__} has no hidden layer with a matrix of weights",
                want="matrices that are neither an embedding nor the output layer, nor in others=",
                fix=f"adamw(lr={self.groups.lr!r}), or muon(..., others=()) for a model without an output layer",
            )
        return hidden

    def _others(self, model: nn.Module) -> set[nn.Parameter]:
        if self.others is None:
            linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
            return set() if not linear else set(linear[-1].parameters())
        return {
            parameter
            for name in self.others
            for parameter in find(model, name, f"muon(others=[{name!r}, ...])").parameters.values()
        }


def _kind(by: str) -> Any:
    """Return torch's optimizer class for a value of `by`; SettingError for a torch without Muon."""
    if by == "adamw":
        return AdamW
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        what = f"muon: torch {torch.__version__} has no torch.optim.Muon"
        raise SettingError(what, want="torch 2.9 or later", fix='pip install "torch>=2.9", or adamw(lr=...)')
    return kind


def checked_betas(owner: str, betas: Any) -> tuple[float, float]:
    """Return betas as two floats, as torch requires; SettingError unless both are from 0 to below 1."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise SettingError(f"{owner}(betas={betas!r})", want="two numbers", fix="betas=(0.9, 0.999)")
    for beta in betas:
        check_number(beta, f"{owner}(betas={betas!r})", least=0, below=1)
    return float(betas[0]), float(betas[1])


def check_fused(owner: str, fused: Any) -> None:
    """Raise SettingError for values of `fused=` other than "auto" and bools."""
    check_choice(fused, owner, "fused", choices=("auto", True, False))


NORMS = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's normalization layers with parameters: batch, instance, layer, group and RMS normalization."""
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules whose children are the layers, if named in `layers`."""


@suggests
def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    lrs: Mapping[str, float] | None = None,
    no_decay: str | Sequence[str] = (),
    layer_decay: float | None = None,
    layers: str | Sequence[str] = (),
) -> list[ParamGroup]:
    """Return the parameters of a model in named groups, for any optimizer with parameter groups.

    Weight decay applies to weights, including embeddings. It does not apply to biases, to other parameters with fewer
    than two dimensions, to parameters of normalization layers, and to `no_decay`. Frozen parameters are included; they
    are updated once they are unfrozen. A tied parameter is in one group. A name is that of a submodule
    (`"backbone.0"`), or a glob over parameter names (`"layer1.*"`).

    Args:
        model: The model.
        lr: The learning rate.
        weight_decay: The weight decay.
        lrs: Learning rates by name. If several names match a parameter, the longest one wins (wildcards do not count).
        no_decay: Names of parameters without weight decay.
        layer_decay: The factor between the learning rates of neighboring layers: with n layers, that of layer i (from
            0, at the input) is multiplied by `layer_decay ** (n - i)`. Parameters in no layer have the full rate.
        layers: Names of layers, from the input to the output. A ModuleList, ModuleDict or Sequential stands for the
            layers inside it; a glob is one layer.

    Raises:
        SettingError: For invalid settings, and for a name that matches no parameter.
    """
    return Groups(
        lr=lr, weight_decay=weight_decay, lrs=lrs, no_decay=no_decay, layer_decay=layer_decay, layers=layers
    ).of(model)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The settings of parameter groups; `owner`: the public function that received them, for errors."""

    lr: float
    weight_decay: float
    lrs: Mapping[str, float] | None
    no_decay: str | Sequence[str]
    layer_decay: float | None
    layers: str | Sequence[str]
    owner: str = "param_groups"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            check_number(value, f"{self.owner}({name}={value!r})", least=0)
        if self.lrs is not None:
            object.__setattr__(self, "lrs", _checked_rates(self.owner, self.lrs))
        for name in ("no_decay", "layers"):
            object.__setattr__(self, name, checked_names(self.owner, name, getattr(self, name)))
        if self.layer_decay is not None:
            check_number(self.layer_decay, f"{self.owner}(layer_decay={self.layer_decay!r})", above=0, most=1)
        if bool(self.layers) != (self.layer_decay is not None):
            have = f"layer_decay={self.layer_decay!r}, layers={self.layers!r}"
            fix = 'layer_decay=0.8, layers=["embedding", "blocks"], from the input to the output'
            raise SettingError(f"{self.owner}: a layer_decay goes with its layers", have=have, fix=fix)

    def as_code(self) -> Iterator[str]:
        """Yield the settings other than `lr` and `weight_decay`, as code."""
        yield f"lrs={self.lrs!r}"
        for name, unset in (("no_decay", ()), ("layer_decay", None), ("layers", ())):
            if getattr(self, name) != unset:
                yield f"{name}={getattr(self, name)!r}"

    def of(self, model: nn.Module) -> list[ParamGroup]:
        """Return the non-empty parameter groups of a model; groups with the common learning rate come first.

        Parameters with and without decay are separate groups even if `weight_decay` is 0, so that checkpoints fit any
        weight decay.
        """
        named = self._parameters(model)
        keys, depths, rates = self._keys(model), self._depths(model), self.lrs or {}
        still = self._without_decay(model, named.values())
        members: dict[tuple[str | None, str | None, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named.items():
            part = (depths.get(parameter), keys.get(parameter), parameter not in still)
            members.setdefault(part, []).append((name, parameter))
        layers = dict.fromkeys(depths.values())
        order = [(y, k, d) for y in (None, *layers) for k in (None, *rates) for d in (True, False)]
        factors: dict[str | None, float] = {
            layer: (self.layer_decay or 1.0) ** (len(layers) - index) for index, layer in enumerate(layers)
        }
        return [
            {
                "params": members[part],
                "name": _name(*part),
                "lr": (self.lr if part[1] is None else rates[part[1]]) * factors.get(part[0], 1.0),
                "weight_decay": self.weight_decay if part[2] else 0.0,
            }
            for part in order
            if part in members
        ]

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        if not isinstance(model, nn.Module):
            what = f"{self.owner}({type(model).__name__}, ...)"
            want, fix = "the model, whose parameters have names", f"{self.owner}(model, ...)"
            raise TypeError(message(what, want=want, fix=fix))
        named = dict(model.named_parameters())
        if not named:
            what = f"{self.owner}: {type(model).__name__} has no parameters"
            raise SettingError(what, want="a model to train")
        if lazy := [name for name, parameter in named.items() if is_lazy(parameter)]:
            what = f"{self.owner}: {lazy[0]!r} has no shape yet, so that it is unknown whether it decays"
            raise SettingError(what, fix="call model(one_batch) once before the optimizer is made")
        return named

    def _keys(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Map each parameter to the name in `lrs` that sets its learning rate; SettingError for an unused name."""
        lrs, matches = self.lrs or {}, dict[nn.Parameter, list[str]]()
        for key in lrs:
            for parameter in find(model, key, f"{self.owner}(lrs={{{key!r}: ...}})").parameters.values():
                matches.setdefault(parameter, []).append(key)
        chosen = {parameter: self._longest(keys) for parameter, keys in matches.items()}
        for key in lrs:
            if key not in chosen.values():
                why = "other names match all of its parameters" if any(key in m for m in matches.values()) else ""
                what = f"{self.owner}(lrs={{{key!r}: ...}}): {why or 'it has no parameters'}"
                raise SettingError(what, fix=f"leave {key!r} out of lrs")
        return chosen

    def _longest(self, keys: list[str]) -> str:
        lrs = self.lrs or {}
        first, *others = sorted(keys, key=_length, reverse=True)
        for other in others:
            if _length(other) == _length(first) and lrs[other] != lrs[first]:
                raise SettingError(
                    f"{self.owner}(lrs=...): {first!r} and {other!r} are equally long and mean one parameter",
                    have=f"{lrs[first]:g} and {lrs[other]:g}",
                    want="a longer name for the one that shall win",
                )
        return first

    def _depths(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Map each parameter in a layer to its layer, in the order of the layers; a tied parameter to the first."""
        layer_of: dict[nn.Parameter, str] = {}
        for name in self.layers:
            written = f"{self.owner}(layers=[{name!r}, ...])"
            layer = find(model, name, written)
            inside = [name]
            if isinstance(layer.submodule, CONTAINERS):
                inside = [f"{name}.{child}" for child, _ in layer.submodule.named_children()]
            if not layer.parameters:
                raise SettingError(f"{written}: it has no parameters", fix=f"leave {name!r} out of layers")
            for path in inside:
                mine = find(model, path, written).parameters.values()
                if mine and all(p in layer_of for p in mine):
                    raise SettingError(f"{written}: all of {path!r} is in an earlier one", want="each once")
                layer_of.update((p, path) for p in mine if p not in layer_of)
        return layer_of

    def _without_decay(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return parameters with fewer than two dimensions, in normalization layers, or named in `no_decay`."""
        norms = {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
        named = {
            p
            for name in self.no_decay
            for p in find(model, name, f"{self.owner}(no_decay=[{name!r}, ...])").parameters.values()
        }
        return norms | named | {p for p in parameters if p.dim() < 2}


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a parameter group; a tensor is filled in place, since the optimizer may hold a reference."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def checked_names(owner: str, setting: str, names: Any) -> tuple[str, ...]:
    """Return names as a tuple; SettingError for anything else."""
    given = (names,) if isinstance(names, str) else names
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        what = f"{owner}({setting}={names!r})"
        raise SettingError(what, want="names of parts of the model", fix=f'{setting}=["head", "*.scale"]')
    return tuple(given)


def _name(layer: str | None, key: str | None, decays: bool) -> str:
    part = ":".join(name for name in (layer, key) if name is not None)
    return (f"{part}." if part else "") + ("decay" if decays else "no_decay")


def _checked_rates(owner: str, lrs: Any) -> dict[str, float]:
    if not isinstance(lrs, Mapping) or not all(isinstance(key, str) for key in lrs):
        raise SettingError(f"{owner}(lrs={lrs!r})", want="a dict of names and rates", fix='lrs={"backbone": 1e-4}')
    for key, rate in lrs.items():
        check_number(rate, f"{owner}(lrs={{{key!r}: {rate!r}}})", least=0)
    return dict(lrs)


def _length(key: str) -> int:
    return len(re.sub(r"\[.*?\]|[*?]", "", key))
