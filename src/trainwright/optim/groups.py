"""Parameter groups by name: weight decay, and a learning rate for each part or layer of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.core.checks import check_number
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import NormWithStatistics
from trainwright.modules.matching import find

NORMS = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Torch's normalization layers that have parameters: batch, instance, layer, group and RMS normalization."""
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules that represent the layers inside them, if named in `layers`."""

Group = dict[str, Any]


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
) -> list[Group]:
    """Return the parameters of a model in named groups, for any optimizer that takes groups.

    Weights decay, embeddings included. Biases, all other parameters with fewer than two dimensions, parameters of
    normalization layers and `no_decay` do not. Frozen parameters are included: they are not updated until they are
    unfrozen. A tied parameter is in one group. A name is that of a submodule (`"backbone.0"`), or a glob over the names
    of parameters (`"layer1.*"`).

    Args:
        model: The model.
        lr: The rate.
        weight_decay: The decay of weights.
        lrs: Rates by name. If several names match a parameter, the longest wins (wildcards do not count).
        no_decay: Names of parameters without decay.
        layer_decay: The factor from each layer's rate to that of the layer before it: with n layers the rate of the
            i-th (from 0) is multiplied by `layer_decay ** (n - i)`. Parameters in no layer have the full rate.
        layers: Names of layers from the input to the output. A ModuleList, ModuleDict or Sequential represents the
            layers inside; a glob is one layer.

    Raises:
        SettingError: For settings that cannot work, and for a name that matches no parameter.
    """
    return Groups(
        lr=lr, weight_decay=weight_decay, lrs=lrs, no_decay=no_decay, layer_decay=layer_decay, layers=layers
    ).of(model)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The settings of groups; `owner`: name of the function that they were given to, for errors."""

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
        """Yield the settings besides rate and decay, as code."""
        yield f"lrs={self.lrs!r}"
        for name, unset in (("no_decay", ()), ("layer_decay", None), ("layers", ())):
            if getattr(self, name) != unset:
                yield f"{name}={getattr(self, name)!r}"

    def of(self, model: nn.Module) -> list[Group]:
        """Return the groups of a model's parameters; those with the common rate come first, and none is empty.

        Decaying and other parameters are separate even without weight decay, so that checkpoints fit for any decay.
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
        """Map each parameter to the name in `lrs` that sets its rate; SettingError for a name that sets none."""
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
        """Map each parameter in a layer to that layer, from the input on; a tied one to the first."""
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
    """Set an option of a parameter group; a tensor is filled: the optimizer may refer to it."""
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
