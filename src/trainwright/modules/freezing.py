"""`freeze` and `unfreeze` parts of a model: no gradients, and norm layers in eval mode even after `model.train()`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from trainwright.core.checks import check_choice
from trainwright.core.errors import SettingError, listed, message
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, NormWithStatistics

if TYPE_CHECKING:
    from trainwright.modules.matching import Found

M = TypeVar("M", bound=nn.Module)


@suggests
def freeze(module: M, pattern: str | None = None, *, norm: Literal["eval", "train"] = "eval") -> M:
    """Freeze all parameters of `module`, or those that `pattern` selects; return the module.

    Sets `requires_grad` to False and gradients to None. A module without parameters is valid.

    Args:
        module: The module.
        pattern: The name of a submodule (`"backbone.0"`), or a glob over parameter names (`"layer1.*"`).
        norm: "eval" keeps norm layers with running statistics in eval mode until `unfreeze`, also after
            `model.train()`: those without a trained parameter, and those without any parameter in a submodule that is
            completely frozen. "train" changes no mode: statistics are updated as before.

    Raises:
        SettingError: If nothing matches `pattern`.
    """
    _check_module("freeze", module)
    check_choice(norm, "freeze", "norm", choices=("eval", "train"), fix='freeze(..., norm="eval")')
    found = _find(module, pattern, f"freeze(..., {pattern!r})")
    for parameter in found.parameters.values():
        parameter.requires_grad_(False)
        # An optimizer updates every parameter with a gradient: a remaining gradient would change the weight once more.
        parameter.grad = None
    layers = _without_training(module, found) if norm == "eval" else []
    for layer in layers:
        vars(layer)["train"] = partial(_stay, layer)
        layer.eval()
    return module


@suggests
def unfreeze(module: M, pattern: str | None = None) -> M:
    """Unfreeze all parameters of `module`, or those that `pattern` selects; return the module.

    Norm layers that `freeze` keeps in eval mode are released if they are in the submodule that `pattern` names, or if
    one of their parameters is unfrozen; layers without parameters follow the module around them. A released layer gets
    the mode of the module around it; `module` itself, if it is such a layer, gets train mode.

    Args:
        module: The module.
        pattern: As in `freeze`. It may select a part of the frozen parameters.

    Raises:
        SettingError: If nothing matches `pattern`, or all matches are integers, which cannot have gradients.
    """
    _check_module("unfreeze", module)
    found = _find(module, pattern, f"unfreeze(..., {pattern!r})")
    trained = {
        name: parameter
        for name, parameter in found.parameters.items()
        if parameter.is_floating_point() or parameter.is_complex()  # only these have gradients
    }
    for parameter in trained.values():
        parameter.requires_grad_(True)
    layers = [layer for layer in _meant(module, found) if held(layer)]
    around = _parents(module)
    for layer in layers:
        del vars(layer)["train"]
        layer.train(around[layer].training if layer in around else True)
    if found.parameters and not (layers or trained):
        dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in found.parameters.values()}))
        what = f"unfreeze: {listed(list(found.parameters))} can hold no gradient"
        raise SettingError(what, have=dtypes, want="parameters of a floating or complex type")
    return module


def held(module: nn.Module) -> bool:
    """Return whether `freeze` keeps this layer in eval mode."""
    stays = vars(module).get("train")
    return isinstance(stays, partial) and stays.func is _stay


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a forward in train mode updates the running mean and variance of this layer itself."""
    return isinstance(module, NormWithStatistics) and module.track_running_stats


def layers_mixing_rows(model: nn.Module, loss: object = None) -> list[str]:
    """Return type and name of the layers whose outputs or statistics for a row depend on other rows of the batch."""
    roots = {"": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    found: list[str] = []
    for prefix, root in roots.items():
        for name, module in root.named_modules(prefix=prefix):
            moves = has_running_statistics(module) and module.training
            if moves or (isinstance(module, BatchNorm) and module.running_mean is None):
                found.append(f"{type(module).__name__} {name!r}" if name else type(module).__name__)
    return found


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace the method `train` of a layer: eval mode for any argument.

    Bound by a `partial` in an instance attribute of the layer, so that the `train` of any parent calls it, and copies
    and pickles of the layer refer to themselves.
    """
    type(module).train(module, False)
    return module


def _find(module: nn.Module, pattern: str | None, asked_by: str) -> Found:
    from trainwright.modules.matching import find

    return find(module, pattern, asked_by)


def _without_training(module: nn.Module, found: Found) -> list[nn.Module]:
    """Return the selected norm layers without a trained parameter."""
    named = set() if found.submodule is None else set(found.submodule.modules())
    return [
        layer
        for layer, judged in _meant(module, found).items()
        if has_running_statistics(layer) and (layer in named or not any(p.requires_grad for p in judged))
    ]


def _meant(module: nn.Module, found: Found) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the modules that a pattern selects, each with the parameters that decide on its mode.

    These are its own parameters, or for a module without any, those of the nearest module around it that has some. A
    module is selected if it is in the submodule that the pattern names, or if a parameter that decides on it matches.
    """
    named = set() if found.submodule is None else set(found.submodule.modules())
    matched, around = set(found.parameters.values()), _parents(module)
    judged: dict[nn.Module, list[nn.Parameter]] = {}
    for part in module.modules():  # parents come before their children
        judged[part] = list(part.parameters()) or judged.get(around.get(part, part), [])
    return {part: by for part, by in judged.items() if part in named or not matched.isdisjoint(by)}


def _parents(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the first parent of each module inside."""
    around: dict[nn.Module, nn.Module] = {}
    for parent in module.modules():
        for child in parent.children():
            around.setdefault(child, parent)
    return around


def _check_module(name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(f"{name}({module!r})", want="a torch.nn.Module", fix=f'{name}(model, "backbone") or {name}(model)')
        )
