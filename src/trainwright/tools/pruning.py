"""Simplify a model: weights masked one by one, or whole channels taken out, after which it really is smaller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainwright.core.checks import check_choice, check_number, check_whole
from trainwright.core.errors import SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.core.torch_private import buffer_dict
from trainwright.core.trees import tensors_in
from trainwright.modules.dry_run import Given
from trainwright.modules.flops import twin_on
from trainwright.modules.matching import Blocks, named
from trainwright.modules.modes import evaluating
from trainwright.tools.calling import given_by
from trainwright.tools.channels import ChannelGroup, Use, groups_of

By = Literal["l1", "bn"] | Callable[[nn.Module, str], Tensor]
"""What a channel is worth: see `shrink`."""
_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far apart two sums of the same numbers may be, as a share of the largest; other types: `_ROUGH`."""
_ROUGH = 0.05


@dataclass(frozen=True)
class Shrunk:
    """A smaller model, and what was taken out of the one that it was made from."""

    model: nn.Module = field(repr=False)
    """A new model, with weights of its own."""
    removed: Mapping[str, tuple[int, ...]]
    """The channels that each layer has lost, by its name."""
    whole: Mapping[str, str]
    """The layers that keep all their channels, and why."""
    parameters: tuple[int, int]
    """Before and after."""

    def __str__(self) -> str:
        """Say what came out, a line for each layer."""
        before, after = self.parameters
        lines = [f"{after:,} of {before:,} parameters are left ({after / before:.0%})"]
        lines += [f"  {name}: {len(lost)} channels removed" for name, lost in self.removed.items()]
        return "\n".join([*lines, *(f"  {name} stays: {why}" for name, why in self.whole.items())])


@suggests
def shrink(
    model: nn.Module,
    example: Any,
    amount: float = 0.5,
    *,
    by: By = "l1",
    layers: Blocks | None = None,
    scope: Literal["layer", "global"] = "layer",
    multiple: int = 1,
) -> Shrunk:
    """Return a smaller copy of a model, without the `amount` of channels that are worth least; `model` stays.

    Channels of linear layers and convolutions are followed by torch.fx through normalisation, activations, pooling
    and flattening to the layers that read them. `by`: "l1" is the mean of the absolute weights that make a channel
    (Li et al., arXiv 1608.08710), "bn" the absolute scale of the BatchNorm behind it (network slimming, arXiv
    1708.06519); or a function of a layer and its name that returns a number for each channel. `scope`: each layer
    loses that share, or all layers together do, by one ranking. A layer keeps a multiple of `multiple` channels, and
    at least one. `layers`: classes, names or globs, or a predicate; None: all. Those that cannot lose channels are in
    `whole`, with the reason. `example`: a batch.

    The small model computes what the big one would with the weights that read these channels at zero: that is tried
    on the example. It needs an optimizer and a Trainer of its own. SettingError for a layer whose name was given and
    that cannot lose channels (a residual sum, a grouped convolution, attention, shared weights), where none can, and
    where the forward cannot be followed.
    """
    check_number(amount, f"shrink(amount={amount!r})", above=0, below=1, what="a share", fix="amount=0.5")
    check_whole(multiple, f"shrink(multiple={multiple!r})")
    check_choice(scope, "shrink", "scope", choices=("layer", "global"))
    if by not in ("l1", "bn") and not callable(by):
        raise SettingError(f"shrink(by={by!r})", want='"l1", "bn", or a function of a layer and its name')
    given = given_by(model, example, "shrink").beside(model)
    groups = groups_of(model, given, "shrink")
    meant = None if layers is None else set(named(model, layers, "shrink"))
    for name, group in groups.items():
        if not group.why and by == "bn" and not _scales(model, group):
            group.why = "there is no BatchNorm with a scale behind it"
        if not group.why and meant is not None and name not in meant:
            group.why = "it was not asked for"
    _check_meant(groups, _said(layers) & (meant or set()), "shrink")
    open_ = {name: group for name, group in groups.items() if not group.why}
    if not open_:
        have = "; ".join(f"{name}: {group.why}" for name, group in groups.items()) or "no linear layer or convolution"
        raise SettingError("shrink: no layer can lose channels", have=have)
    scores = {name: _worth(model, group, by) for name, group in open_.items()}
    lost = _least(scores, amount, by_layer=scope == "layer", multiple=multiple)
    return _without(model, given, groups, lost=lost)


def remove_channels(model: nn.Module, example: Any, channels: Mapping[str, Collection[int]]) -> Shrunk:
    """Return a smaller copy of a model without these channels of these layers, by name; `model` stays.

    As `shrink` does it. SettingError for a layer that cannot lose channels, and for a channel that there is not.
    """
    given = given_by(model, example, "remove_channels").beside(model)
    groups = groups_of(model, given, "remove_channels")
    _check_meant(groups, set(channels), "remove_channels")
    for name, lost in channels.items():
        size = groups[name].size
        if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < size for one in lost):
            want = f"channels from 0 to {size - 1}"
            raise SettingError(f"remove_channels({{{name!r}: {sorted(lost)}}})", want=want)
        if len(set(lost)) == size:
            raise SettingError(f"remove_channels: {name} would have no channel left", where=True)
    gone = {name: tuple(sorted(set(one))) for name, one in channels.items() if one}
    for name, group in groups.items():
        group.why = group.why or ("" if name in gone else "it was not asked for")
    return _without(model, given, groups, lost=gone)


def _said(layers: Any) -> set[str]:
    """What was given as names."""
    several = (
        [layers] if isinstance(layers, str) else layers if isinstance(layers, list | tuple | set | frozenset) else []
    )
    return {one for one in several if isinstance(one, str)}


def _check_meant(groups: Mapping[str, ChannelGroup], meant: set[str], call: str) -> None:
    for name in meant:
        if name not in groups:
            what = f"{call}: {name!r} is no linear layer or convolution that the forward calls."
            raise SettingError(what + did_you_mean(name, groups), have=", ".join(groups) or "none")
        if groups[name].why:
            raise SettingError(f"{call}: {name} cannot lose channels: {groups[name].why}", where=True)


def _scales(model: nn.Module, group: ChannelGroup) -> list[Tensor]:
    found = (model.get_submodule(use.name) for use in group.norms if use.repeat == 1)
    return [one.weight.detach() for one in found if isinstance(one.weight, Tensor)]


def _worth(model: nn.Module, group: ChannelGroup, by: By) -> Tensor:
    """A number for each channel of a layer."""
    module: Any = model.get_submodule(group.maker)
    if by == "l1":
        weight: Tensor = module.weight.detach()
        return weight.abs().flatten(1).mean(1).double().cpu()
    if by == "bn":
        return torch.stack([scale.abs().double().cpu() for scale in _scales(model, group)]).sum(0)
    assert callable(by)
    scores = torch.as_tensor(by(module, group.maker)).detach().double().cpu()
    if scores.shape != (group.size,) or scores.isnan().any():
        have = f"shape {tuple(scores.shape)}" if scores.shape != (group.size,) else "NaN"
        what = f"shrink(by=...): what it returned for {group.maker} is no number for each channel"
        raise SettingError(what, have=have, want=f"shape ({group.size},)")
    return scores


def _least(scores: Mapping[str, Tensor], amount: float, *, by_layer: bool, multiple: int) -> dict[str, tuple[int, ...]]:
    """The channels that go, by layer."""
    ranked = torch.cat(list(scores.values())).argsort(stable=True)
    owners = torch.cat([torch.full((len(one),), place) for place, one in enumerate(scores.values())])
    chosen = owners[ranked[: _share(amount, len(ranked))]]
    lost = {}
    for place, (name, worth) in enumerate(scores.items()):
        size = len(worth)
        goes = _share(amount, size) if by_layer else int((chosen == place).sum())
        left = max(1, size - goes)
        left = min(size, -(-left // multiple) * multiple)
        if left < size:
            lost[name] = tuple(sorted(worth.argsort(stable=True)[: size - left].tolist()))
    return lost


def _share(amount: float, of: int) -> int:
    """So many of them, whole: 0.58 of 50 is 29, though the product is a little less."""
    return int(amount * of + 1e-9)


def _without(
    model: nn.Module, given: Given, groups: Mapping[str, ChannelGroup], *, lost: Mapping[str, tuple[int, ...]]
) -> Shrunk:
    small = copy.deepcopy(model)
    for name, channels in lost.items():
        _cut(small, groups[name], channels)
    _try(model, small, given, lost={name: (groups[name], channels) for name, channels in lost.items()})
    whole = {
        name: group.why or "its share is less than a channel" for name, group in groups.items() if name not in lost
    }
    before, after = (sum(p.numel() for p in one.parameters()) for one in (model, small))
    return Shrunk(small, dict(lost), whole, (before, after))


def _cut(model: nn.Module, group: ChannelGroup, channels: tuple[int, ...]) -> None:
    """Take channels out of a layer, what scales them and what reads them, in place."""
    keep = _features(sorted(set(range(group.size)) - set(channels)), 1)
    maker: Any = model.get_submodule(group.maker)
    _narrow(maker, ("weight", "bias"), keep, dim=0)
    _resize(maker, ("out_channels", "out_features"), len(keep))
    for use in group.norms:
        norm: Any = model.get_submodule(use.name)
        wide = _features(keep.tolist(), use.repeat)
        _narrow(norm, ("weight", "bias", "running_mean", "running_var"), wide, dim=0)
        norm.num_features = len(wide)
    for use in group.readers:
        reader: Any = model.get_submodule(use.name)
        wide = _features(keep.tolist(), use.repeat)
        _narrow(reader, ("weight",), wide, dim=1)
        _resize(reader, ("in_channels", "in_features"), len(wide))


def _features(channels: list[int], repeat: int) -> Tensor:
    """The features of channels, each of them `repeat` wide."""
    return torch.tensor([channel * repeat + i for channel in channels for i in range(repeat)], dtype=torch.long)


def _narrow(module: Any, names: tuple[str, ...], keep: Tensor, *, dim: int) -> None:
    for name in names:
        tensor = getattr(module, name, None)
        if tensor is None:
            continue
        left = tensor.detach().index_select(dim, keep.to(tensor.device))
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, nn.Parameter(left, requires_grad=tensor.requires_grad))
        else:
            buffer_dict(module)[name] = left


def _resize(module: Any, names: tuple[str, ...], size: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, size)


def _try(
    model: nn.Module, small: nn.Module, given: Given, *, lost: Mapping[str, tuple[ChannelGroup, tuple[int, ...]]]
) -> None:
    """Compare the small model with the big one whose weights that read the lost channels are zero."""
    big, tried = twin_on(model, None), twin_on(small, None)
    with rng_preserved(), torch.no_grad(), evaluating(big, tried):
        for group, channels in lost.values():
            for use in group.readers:
                _silence(big, use, channels)
        one, other = (list(tensors_in(given.beside(twin).run(twin))) for twin in (big, tried))
    for ours, theirs in zip(other, one, strict=True):
        if ours.shape == theirs.shape and ours.is_floating_point():
            allowed = _CLOSE.get(ours.dtype, _ROUGH) * float(theirs.abs().max())
            if bool((ours - theirs).abs().max() <= allowed):
                continue
        elif torch.equal(ours, theirs):
            continue
        what = "the smaller model does not compute what the bigger one does without these channels"
        raise SettingError(what, have=", ".join(lost), fix="layers= without the layer that is to blame")


def _silence(model: nn.Module, use: Use, channels: tuple[int, ...]) -> None:
    reader: Any = model.get_submodule(use.name)
    reader.weight[:, _features(list(channels), use.repeat).to(reader.weight.device)] = 0
