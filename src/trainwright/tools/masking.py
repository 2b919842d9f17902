"""Mask the weights of a model that are worth least, by torch.nn.utils.prune; the model trains on around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from trainwright.core.checks import check_choice, check_number
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import buffer_dict, parameter_dict
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.matching import Blocks, named
from trainwright.tools.channels import MAKERS


@suggests
def mask_weights(
    model: nn.Module, amount: float, *, layers: Blocks | None = None, scope: Literal["global", "layer"] = "global"
) -> Masked:
    """Set the share `amount` of the weights to zero, those nearest to zero, and keep them there; return what ends it.

    Of all linear layers and convolutions, or of `layers` (classes, names or globs, or a predicate); by one ranking,
    or each layer by its own with `scope="layer"`. `amount` is the whole share that is then zero: called again with
    more, weights that are masked stay so (gradual pruning: call it in `begin_epoch`). Torch's `prune` computes
    `weight` from the parameter `weight_orig`, which is the same object as `weight` was, and the buffer `weight_mask`:
    optimizers made before or after go on, and masked weights get no gradient. A checkpoint has the names `weight_orig`
    and `weight_mask`: mask a model before weights of a masked one are loaded. Nothing gets smaller or faster by it:
    that is what `shrink` is for. SettingError where fewer weights would be masked than are, and where a weight is
    computed otherwise, shared, or in shards.
    """
    check_number(amount, f"mask_weights(amount={amount!r})", above=0, below=1, what="a share", fix="amount=0.8")
    check_choice(scope, "mask_weights", "scope", choices=("global", "layer"))
    every = dict(model.named_modules()) if layers is None else named(model, layers, "mask_weights")
    found = {name: module for name, module in every.items() if isinstance(module, MAKERS)}
    _check(model, found)
    values = {name: _worth(module) for name, module in found.items()}
    for group in [list(found)] if scope == "global" else [[name] for name in found]:
        for name, mask in _masks({name: values[name] for name in group}, amount).items():
            _put(found[name], mask)
    return Masked(model, tuple(found))


@dataclass(frozen=True)
class Masked:
    """A model some of whose weights are masked."""

    model: nn.Module = field(repr=False)
    names: tuple[str, ...]
    """The layers with masks."""

    @property
    def zeros(self) -> int:
        """How many weights are masked."""
        return sum(int((mask == 0).sum()) for mask in self._masks())

    @property
    def weights(self) -> int:
        """How many weights these layers have."""
        return sum(mask.numel() for mask in self._masks())

    def __str__(self) -> str:
        """One line."""
        return f"{self.zeros:,} of {self.weights:,} weights masked in {len(self.names)} layers"

    def remove(self) -> None:
        """Have plain parameters again, whose masked weights are zero; training on would move them."""
        for name in self.names:
            module = self.model.get_submodule(name)
            if _is_masked(module):
                prune.remove(module, "weight")

    def _masks(self) -> list[Tensor]:
        modules = [self.model.get_submodule(name) for name in self.names]
        return [module.get_buffer("weight_mask") for module in modules if _is_masked(module)]


def _is_masked(module: nn.Module) -> bool:
    return "weight_mask" in buffer_dict(module) and "weight_orig" in parameter_dict(module)


def _worth(module: nn.Module) -> Tensor:
    """The absolute weights; what is masked is less than any."""
    if not _is_masked(module):
        return module.get_parameter("weight").detach().abs()
    worth = module.get_parameter("weight_orig").detach().abs()
    return worth.masked_fill(module.get_buffer("weight_mask") == 0, -1)


def _masks(worth: Mapping[str, Tensor], amount: float) -> dict[str, Tensor]:
    """A mask for each layer; exactly the share of all their weights is zero, of equal ones the first."""
    flat = torch.cat([one.flatten().to("cpu", torch.float64) for one in worth.values()])
    zeros = round(amount * len(flat))
    if (before := int((flat < 0).sum())) > zeros:
        have = f"{before / len(flat):.1%} are masked"
        raise SettingError(f"mask_weights(amount={amount:g})", have=have, want="as much or more")
    mask = torch.ones(len(flat))
    mask[flat.argsort(stable=True)[:zeros]] = 0
    pieces = mask.split([one.numel() for one in worth.values()])
    return {name: piece.view(one.shape) for (name, one), piece in zip(worth.items(), pieces, strict=True)}


def _put(module: Any, mask: Tensor) -> None:
    """Give a module its mask, in the place of one that it has: that one others may hold, to put its numbers back."""
    if not _is_masked(module):
        prune.custom_from_mask(module, "weight", mask.to(module.weight.device))
    else:
        module.weight_mask = mask.to(module.weight_mask)
    # Until the next forward computes it: without a graph, so that the model can be copied.
    module.weight = (module.weight_orig * module.weight_mask).detach()


def _check(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    if not found:
        raise SettingError("mask_weights: no linear layer or convolution is meant", want="layers with weights")
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in parameter_dict(module).values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for name, module in found.items():
        weight = parameter_dict(module).get("weight_orig" if _is_masked(module) else "weight")
        if parametrize.is_parametrized(module) or weight is None:
            what, fix = "is computed from others", "leave it out of layers="
        elif is_sharded(weight):
            what, fix = "is in shards", "mask_weights before Trainer(parallel=FSDP(...))"
        elif nn.parameter.is_lazy(weight):
            what, fix = "has no shape yet", "call model(one_batch) once before"
        elif holders[id(weight)] > 1:
            what, fix = "is shared with another module, which would go without the mask", "leave it out of layers="
        else:
            continue
        raise SettingError(f"mask_weights: the weight of {name} {what}", fix=fix)
