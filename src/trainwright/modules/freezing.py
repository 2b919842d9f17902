"""Freeze parts of a model for good: no gradients, and normalisation statistics that stay through `model.train()`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from trainwright.core.errors import SettingError, listed, message
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, NormWithStatistics

if TYPE_CHECKING:
    from trainwright.modules.matching import Found

M = TypeVar("M", bound=nn.Module)


@suggests
def freeze(module: M, pattern: str | None = None, *, norm: Literal["eval", "train"] = "eval") -> M:
    """Stop training all parameters of `module`, or those that `pattern` means; return the module.

    `pattern` is the name of a submodule ("backbone.0") or a glob over the names of parameters ("layer1.*", "*.bias").
    With `norm="eval"`, normalisation layers with running statistics none of whose parameters is trained any more, and
    those without parameters in a submodule that is now wholly frozen, go to eval mode and stay there, through
    `model.train()` too, until `unfreeze`. With "train" no mode is touched, and their statistics go on moving.
    Gradients of what is frozen are dropped. A module without parameters has nothing to freeze: no error. SettingError
    where nothing has such a name.
    """
    _check_module("freeze", module)
    if norm not in ("eval", "train"):
        raise SettingError(f"freeze(norm={norm!r})", want='"eval" or "train"', fix='freeze(..., norm="eval")')
    found = _find(module, pattern, f"freeze(..., {pattern!r})")
    for parameter in found.parameters.values():
        parameter.requires_grad_(False)
        # An optimizer steps whatever has a gradient: one that is left over would move the weight once more.
        parameter.grad = None
    layers = _without_training(module, found) if norm == "eval" else []
    for layer in layers:
        vars(layer)["train"] = partial(_stay, layer)
        layer.eval()
    return module


@suggests
def unfreeze(module: M, pattern: str | None = None) -> M:
    """Train all parameters of `module` again, or those that `pattern` means, as in `freeze`; return the module.

    Normalisation layers that `freeze` keeps in eval mode are released where they lie in a submodule that was named,
    where one of their parameters is trained again, or, if they have none, one of the submodule they lie in. They get
    the mode of the module around them; a layer that is given itself gets train mode. A part of what was frozen may be
    named. SettingError where nothing has such a name, and where all that has can hold no gradient (integers).
    """
    _check_module("unfreeze", module)
    found = _find(module, pattern, f"unfreeze(..., {pattern!r})")
    trained = {
        name: parameter
        for name, parameter in found.parameters.items()
        if parameter.is_floating_point() or parameter.is_complex()  # others can have no gradient
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
    """Whether `freeze` keeps this layer in eval mode."""
    stays = vars(module).get("train")
    return isinstance(stays, partial) and stays.func is _stay


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a forward in train mode moves this layer's own running mean and variance."""
    return isinstance(module, NormWithStatistics) and module.track_running_stats


def layers_mixing_rows(model: nn.Module, loss: object = None) -> list[str]:
    """The layers, by type and name, whose outputs or statistics for a row depend on the other rows of its batch."""
    roots = {"": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    found: list[str] = []
    for prefix, root in roots.items():
        for name, module in root.named_modules(prefix=prefix):
            moves = has_running_statistics(module) and module.training
            if moves or (isinstance(module, BatchNorm) and module.running_mean is None):
                found.append(f"{type(module).__name__} {name!r}" if name else type(module).__name__)
    return found


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in the place of a layer's `train`: eval mode, whatever is asked.

    It is bound to its layer by a `partial` in the layer's own attributes, so that the `train` of any parent finds it,
    and copies and pickles of the layer refer to themselves.
    """
    type(module).train(module, False)
    return module


def _find(module: nn.Module, pattern: str | None, asked_by: str) -> Found:
    from trainwright.modules.matching import find

    return find(module, pattern, asked_by)


def _without_training(module: nn.Module, found: Found) -> list[nn.Module]:
    """The normalisation layers that are meant, and that nothing trains any more."""
    named = set() if found.submodule is None else set(found.submodule.modules())
    return [
        layer
        for layer, judged in _meant(module, found).items()
        if has_running_statistics(layer) and (layer in named or not any(p.requires_grad for p in judged))
    ]


def _meant(module: nn.Module, found: Found) -> dict[nn.Module, list[nn.Parameter]]:
    """The modules that a pattern means, each with the parameters that it is judged by.

    Those are its own; for a module without any they are those of the nearest module around it that has some. Meant is
    what lies in a submodule that was named, or is judged by a parameter that was.
    """
    named = set() if found.submodule is None else set(found.submodule.modules())
    matched, around = set(found.parameters.values()), _parents(module)
    judged: dict[nn.Module, list[nn.Parameter]] = {}
    for part in module.modules():  # what is around a module comes before it
        judged[part] = list(part.parameters()) or judged.get(around.get(part, part), [])
    return {part: by for part, by in judged.items() if part in named or not matched.isdisjoint(by)}


def _parents(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module inside, the first one that contains it."""
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
