"""One optimizer of torch's Muon for hidden matrices, and of AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.core.checks import check_choice, check_number
from trainwright.core.errors import SettingError, message
from trainwright.modules.matching import find
from trainwright.optim.fused import step_of
from trainwright.optim.groups import Group, Groups, checked_names
from trainwright.optim.optimizers import Factory, Fused, check_fused, serves

Inner = tuple[Optimizer, Callable[[], Any]]
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class MuonAdamW(Optimizer):
    """Steps the groups with `by="muon"` by `torch.optim.Muon`, those with `by="adamw"` by `torch.optim.AdamW`.

    A group may hold any setting of its optimizer; what it does not hold has the optimizer's own default. To the outside
    it is one optimizer: one list of groups, one state, one schedule. SettingError for a torch without Muon: it came
    with 2.9.
    """

    def __init__(self, params: Iterable[Group], lr: float = 1e-3) -> None:
        super().__init__(list(params), {"lr": lr, "differentiable": False})  # as torch has it after every load

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, which says under `by` whose it is."""
        by = param_group.get("by")
        if by not in ("muon", "adamw"):
            raise SettingError(message(f"a group with by={by!r}", want='"muon" or "adamw"', fix='{..., "by": "adamw"}'))
        super().add_param_group(param_group)
        _kind(by)([param_group])  # gives the group its defaults, and refuses what this optimizer cannot train

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both; gives the loss where a closure computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for by in ("muon", "adamw"):
            groups = [group for group in self.param_groups if group["by"] == by]
            if groups:
                inner, step = self._inner(by, groups)
                inner.param_groups, inner.state = groups, self.state  # a load has replaced them
                step()
        return loss

    def _inner(self, by: str, groups: list[Group]) -> Inner:
        """Torch's optimizer of these groups, and its step. No copy and no pickle of this one has them."""
        made: dict[str, Inner] = vars(self).setdefault("_made", {})
        if by not in made:
            inner = _kind(by)(groups)
            made[by] = inner, step_of(inner)
        return made[by]


@dataclass(frozen=True, kw_only=True)
class GroupedMuon(Factory):
    """What `muon` gives: makes the optimizer of a model when it is called with it."""

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
            raise SettingError(message(what, fix='muon(lr=0.02, adjust_lr="original", adamw_lr=3e-4)'))
        if self.others is not None:
            object.__setattr__(self, "others", checked_names("muon", "others", self.others))

    def __repr__(self) -> str:
        own = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "groups"]
        given = [f"lr={self.groups.lr!r}", f"weight_decay={self.groups.weight_decay!r}", *self.groups.shown(), *own]
        return f"muon({', '.join(given)})"

    def __call__(self, model: nn.Module) -> MuonAdamW:
        """Group the model's parameters, and make the optimizer."""
        groups, hidden = self.groups.of(model), self._hidden(model)
        rest = [p for p in model.parameters() if p not in hidden]
        fused = serves(AdamW, rest) if self.fused == "auto" else self.fused
        return MuonAdamW([part for group in groups for part in self._split(group, hidden, fused)], lr=self.groups.lr)

    def _split(self, group: Group, hidden: set[nn.Parameter], fused: bool) -> Iterator[Group]:
        """Muon's part of a group, then AdamW's; an empty one is left out."""
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
        """The matrices of hidden layers; SettingError where there is none."""
        embeddings = {m.weight for m in model.modules() if isinstance(m, EMBEDDINGS)}
        matrices = {p for p in model.parameters() if p.dim() == 2 and p.is_floating_point()}
        hidden = matrices - embeddings - self._others(model)
        if not hidden:
            raise SettingError(
                message(
                    f"muon: {type(model).__name__} has no hidden layer with a matrix of weights",
                    want="matrices that are neither an embedding nor the output layer, nor in others=",
                    fix=f"adamw(lr={self.groups.lr!r}), or muon(..., others=()) for a model without an output layer",
                )
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
    """Torch's class of this name; SettingError for a torch that has no Muon yet."""
    if by == "adamw":
        return AdamW
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        what = f"muon: torch {torch.__version__} has no torch.optim.Muon"
        raise SettingError(message(what, want="torch 2.9 or later", fix='pip install "torch>=2.9", or adamw(lr=...)'))
    return kind
