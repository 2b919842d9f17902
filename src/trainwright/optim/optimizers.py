"""Functions that make an optimizer for a model: AdamW, SGD and Muon with parameter groups, fused where supported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer

from trainwright.core.checks import check_choice, check_number
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import devices_with_fused_kernels
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.matching import find
from trainwright.optim.fused import dtype_broken_in_sgd, step_of
from trainwright.optim.groups import Group, Groups, checked_names

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
    """Return a function that makes `torch.optim.AdamW` for a model, with named groups.

    Args:
        lr: The rate.
        weight_decay: The decay of weights; biases and norms have none, as in `param_groups`.
        betas: As in torch.
        eps: As in torch.
        lrs: Rates by name, as in `param_groups`.
        no_decay: Names without decay, as in `param_groups`.
        layer_decay: The factor of the rate from layer to layer, as in `param_groups`.
        layers: The names of layers, as in `param_groups`.
        fused: "auto" uses torch's fused kernels if all parameters are floating point on devices that have them, the CPU
            included.

    Raises:
        SettingError: For settings that cannot work.
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
    """Return a function that makes `torch.optim.SGD` for a model, with momentum and named groups.

    Args:
        lr: The rate.
        momentum: As in torch.
        weight_decay: The decay of weights; biases and norms have none, as in `param_groups`.
        nesterov: As in torch.
        lrs: Rates by name, as in `param_groups`.
        no_decay: Names without decay, as in `param_groups`.
        layer_decay: The factor of the rate from layer to layer, as in `param_groups`.
        layers: The names of layers, as in `param_groups`.
        fused: "auto" uses torch's fused kernels if they support all parameters: not bfloat16 or float16 on a CPU, where
            the kernel is wrong.

    Raises:
        SettingError: For settings that cannot work.
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
    """Return a function that makes one optimizer for a model: `torch.optim.Muon` and, for other parameters, AdamW.

    Muon makes the update of a hidden layer's matrix orthogonal (https://kellerjordan.github.io/posts/muon/). It gets
    the weights with two dimensions, except embeddings and `others`. AdamW trains all other parameters. Groups are those
    of `param_groups`, each split in two. Requires torch 2.9.

    Args:
        lr: The rate of Muon, and of AdamW where `adamw_lr` is not given.
        weight_decay: The decay of weights.
        momentum: The momentum of Muon.
        nesterov: As in torch.
        adjust_lr: "match_rms_adamw" makes Muon's steps as long as AdamW's (arXiv 2502.16982): one rate is right for
            both. "original" is that of the page above, and requires an `adamw_lr`.
        adamw_lr: The rate of AdamW.
        betas: The betas of AdamW.
        others: Names of matrices that AdamW trains: the output layer, and any other that is no hidden layer. None: the
            last `nn.Linear` that the model defines. `()` excludes none.
        lrs: Rates by name, as in `param_groups`.
        no_decay: Names without decay, as in `param_groups`.
        layer_decay: The factor of the rate from layer to layer, as in `param_groups`.
        layers: The names of layers, as in `param_groups`.
        fused: Whether AdamW uses torch's fused kernels. "auto": where it supports all parameters.

    Raises:
        SettingError: For settings that cannot work, and for a torch without Muon.
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
    """Return `{"fused": True}` for a torch class, or a partial of one, that supports it for `model`; else no keyword.

    None is added if the partial sets `fused`, `foreach` or `differentiable` itself, or if gradients are sparse.
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
    """Return whether a torch optimizer was given no implementation, and torch's fused kernels support it."""
    target, groups = type(optimizer), optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    open_ = all(
        group.get("fused", False) is None and group.get("foreach", False) is None and not group.get("differentiable")
        for group in groups
    )
    return open_ and target.__module__.startswith("torch.optim.") and supports_fused(target, parameters)


def supports_fused(target: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the fused kernels of this torch class support all of these parameters.

    Adagrad's is for the CPU alone up to 2.11, and SGD's is wrong there for reduced precision up to 2.13. Shards have
    those of Adam and AdamW alone. False for a torch that does not list the devices of its fused kernels.
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
    """Return whether the fused kernels of this torch class support a model, all of whose gradients are dense."""
    is_dense = not any(getattr(module, "sparse", False) is True for module in model.modules())
    return is_dense and supports_fused(target, model.parameters())


class OptimizerFactory:
    """A function that makes an optimizer for a model; the trainer calls it with the module to be trained."""

    groups: Groups

    def __call__(self, model: nn.Module) -> Optimizer:
        """Group the model's parameters, and make the optimizer."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The name of the function that returned it."""
        return self.groups.owner


@dataclass(frozen=True, kw_only=True)
class TorchFactory(OptimizerFactory):
    """Returned by `adamw` and `sgd`: makes a torch optimizer for a model."""

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
        """Group the model's parameters, and make the optimizer."""
        groups = self.groups.of(model)
        fused = _supports_fused_for(self.kind, model) if self.fused == "auto" else self.fused
        return self.kind(groups, lr=self.groups.lr, **self.settings, fused=fused)


class MuonAdamW(Optimizer):
    """Updates groups with `by="muon"` by `torch.optim.Muon`, and groups with `by="adamw"` by `torch.optim.AdamW`.

    A group may hold any setting of its optimizer; other settings have their defaults. To users it is one optimizer: one
    list of groups, one state, one schedule. SettingError for a torch without Muon, which came with 2.9.
    """

    def __init__(self, params: Iterable[Group], lr: float = 1e-3) -> None:
        super().__init__(list(params), {"lr": lr, "differentiable": False})  # as torch has it after every load

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its `by` names the optimizer that updates it."""
        by = param_group.get("by")
        if by not in ("muon", "adamw"):
            raise SettingError(f"a group with by={by!r}", want='"muon" or "adamw"', fix='{..., "by": "adamw"}')
        super().add_param_group(param_group)
        _kind(by)([param_group])  # sets the group's defaults, and refuses parameters that it cannot train

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both; return the loss if a closure computes it."""
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

    def _inner(self, by: str, groups: list[Group]) -> Inner:
        """Return torch's optimizer of these groups, and its step. Copies and pickles leave them out."""
        made: dict[str, Inner] = vars(self).setdefault("_made", {})
        if by not in made:
            inner = _kind(by)(groups)
            made[by] = inner, step_of(inner)
        return made[by]


@dataclass(frozen=True, kw_only=True)
class MuonFactory(OptimizerFactory):
    """Returned by `muon`: makes a `MuonAdamW` for a model."""

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
        """Group the model's parameters, and make the optimizer."""
        groups, hidden = self.groups.of(model), self._hidden(model)
        rest = [p for p in model.parameters() if p not in hidden]
        fused = supports_fused(AdamW, rest) if self.fused == "auto" else self.fused
        return MuonAdamW([part for group in groups for part in self._split(group, hidden, fused)], lr=self.groups.lr)

    def _split(self, group: Group, hidden: set[nn.Parameter], fused: bool) -> Iterator[Group]:
        """Yield Muon's part of a group, then AdamW's, unless empty."""
        factor = 1.0 if self.adamw_lr is None else self.adamw_lr / self.groups.lr
        settings: dict[str, Group] = {
            "muon": {"momentum": self.momentum, "nesterov": self.nesterov, "adjust_lr_fn": self.adjust_lr},
            "adamw": {"betas": self.betas, "fused": fused, "lr": group["lr"] * factor},
        }
        for by, own in settings.items():
            members = [(name, p) for name, p in group["params"] if (p in hidden) == (by == "muon")]
            if members:
                yield group | {"params": members, "name": f"{group['name']}.{by}", "by": by} | own

    def _hidden(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the matrices of hidden layers; SettingError if there is none."""
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
    """Return torch's class of this name; SettingError for a torch without Muon."""
    if by == "adamw":
        return AdamW
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        what = f"muon: torch {torch.__version__} has no torch.optim.Muon"
        raise SettingError(what, want="torch 2.9 or later", fix='pip install "torch>=2.9", or adamw(lr=...)')
    return kind


def checked_betas(owner: str, betas: Any) -> tuple[float, float]:
    """Return two numbers from 0 to below 1, as floats: torch accepts no integers here."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise SettingError(f"{owner}(betas={betas!r})", want="two numbers", fix="betas=(0.9, 0.999)")
    for beta in betas:
        check_number(beta, f"{owner}(betas={betas!r})", least=0, below=1)
    return float(betas[0]), float(betas[1])


def check_fused(owner: str, fused: Any) -> None:
    """Refuse values other than "auto" and bools."""
    check_choice(fused, owner, "fused", choices=("auto", True, False))
