"""The modules of a model that FSDP shards, the checks before it, and their first weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from trainwright.core.errors import SettingError
from trainwright.core.torch_private import buffer_dict, parameter_dict
from trainwright.distributed.world import World
from trainwright.modules.dtensors import is_sharded

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own."""
SHOWN = 12
"""Classes or modules that an error lists."""


def chosen(model: nn.Module, blocks: Collection[type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that are sharded one by one: those of the classes `blocks`, inner ones first, then the model.

    SettingError for a class of which the model has no module.
    """
    kinds = {type(module) for module in model.modules()}
    for block in blocks:
        if not any(issubclass(kind, block) for kind in kinds):
            names = sorted({kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.")})
            names += sorted({kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")})
            what = f"FSDP(blocks={{{block.__name__}}}): the model has no module of this class"
            raise SettingError(what, have=", ".join(names[:SHOWN]), want="classes of modules that it has")
    found = [module for module in model.modules() if isinstance(module, tuple(blocks)) and module is not model]
    return [*reversed(found), model]  # a module comes before those in it


def check_model(
    model: nn.Module, modules: Sequence[nn.Module], *, processes: int, reshard_after_forward: bool | int | None
) -> None:
    """Raise SettingError with the name of a parameter that `fully_shard` cannot shard, before anything is changed."""
    if (
        reshard_after_forward is not None
        and not isinstance(reshard_after_forward, bool)
        and processes % reshard_after_forward
    ):
        what = f"FSDP(reshard_after_forward={reshard_after_forward}) on {processes} processes"
        raise SettingError(what, want=f"True, False, or a divisor of {processes}")
    names = {id(module): name for name, module in model.named_modules()}
    homes: dict[int, nn.Module] = {}
    for module in modules:
        types = set()
        for name, parameter in _held(module, set(map(id, modules)), names[id(module)]):
            _check_parameter(name, parameter)
            if homes.setdefault(id(parameter), module) is not module:
                raise _shared(name, module, homes[id(parameter)])
            types |= {parameter.dtype} if parameter.requires_grad else set()
        if len(types) > 1:
            where = names[id(module)] or type(module).__name__
            have = ", ".join(sorted(map(str, types)))
            what = f"the trained weights of {where} are of several types, and are gathered together"
            raise SettingError(what, have=have, want="one type", fix="model.float(), or frozen weights")
    for name, module in model.named_modules():
        if any(map(_is_meta, _own(module))) and not hasattr(module, "reset_parameters"):
            raise SettingError(
                f"{name or 'the model'} ({type(module).__name__}) lies on the meta device and cannot be begun",
                want="a reset_parameters() that gives its own parameters and buffers their first values",
                fix=f"def reset_parameters(self) in {type(module).__name__}, or a model that is built on the CPU",
            )


def check_forward(model: nn.Module, modules: Sequence[nn.Module], *, calls_methods: bool) -> None:
    """Raise SettingError for a model without a forward, several networks in one, where nothing gathers weights."""
    if type(model).forward is not nn.Module.forward:
        return
    parts = dict.fromkeys(type(child).__name__ for child in model.children())
    fix = f"FSDP(blocks={{{', '.join(parts)}}}), with the class of each network"
    if isinstance(model, CONTAINERS):
        kind = type(model).__name__
        name = next((name for name, _ in model.named_children()), "G")
        raise SettingError(
            f"the model is a {kind}, which has no forward that gathers weights: FSDP cannot shard it",
            have=", ".join(f"{name}: {type(child).__name__}" for name, child in model.named_children()),
            want="a module of your own that holds the networks as attributes, and each network as a block",
            fix=f"class Nets(nn.Module) with self.{name if name.isidentifier() else 'G'} = ..., and {fix}",
        )
    held = [name for name, _ in _held(model, set(map(id, modules)), "")]
    if held and not calls_methods:
        have = f"{len(held)} parameters outside of all blocks, such as {held[0]}"
        what = f"the {type(model).__name__} has no forward, so that nothing gathers weights which lie in no block"
        raise SettingError(what, have=have, want="a forward, or every network as a block", fix=fix)


def first_weights(module: nn.Module, world: World, *, device: torch.device, known: dict[int, nn.Parameter]) -> None:
    """Move a module to the device and broadcast rank 0's weights, but for the modules in it that are sharded.

    What lies on the meta device is made there by `reset_parameters`; `known` has the parameters made so far, for ties.
    """
    unmade = []
    for inner in module.modules():
        if any(map(_is_meta, _own(inner))):
            _make(inner, device, known)
            unmade.append(inner)
    with torch.no_grad():
        for inner in unmade:
            inner.reset_parameters()  # type: ignore[operator]
    plain = [parameter for parameter in module.parameters() if not is_sharded(parameter)]
    for tensor in (*plain, *module.buffers()):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
    world.broadcast_tensors(plain)


def _held(module: nn.Module, others: set[int], path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are gathered with a module, by name: those of sharded modules in it are left out."""
    for name, parameter in parameter_dict(module).items():
        if parameter is not None:
            yield f"{path}.{name}".lstrip("."), parameter
    for name, child in module.named_children():
        if id(child) not in others:
            yield from _held(child, others, f"{path}.{name}".lstrip("."))


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    what, fix = "", ""
    if nn.parameter.is_lazy(parameter):
        what, fix = "has no shape yet", "run one batch through the model first"
    elif is_sharded(parameter):
        what, fix = "is a DTensor already", "fully_shard(model) before Trainer(...): such a model is taken as it is"
    elif not parameter.ndim:
        what, fix = "is a single number, of which there are no shards", "nn.Parameter(torch.ones(1)): one element"
    elif not parameter.is_contiguous():
        what, fix = "does not lie in memory row by row", "model.to(memory_format=torch.contiguous_format)"
    if what:
        raise SettingError(f"{name} cannot be sharded: it {what}", fix=fix)


def _shared(name: str, one: nn.Module, other: nn.Module) -> SettingError:
    return SettingError(
        f"{name} is shared by modules that are gathered at different times",
        have=f"one {type(one).__name__} and one {type(other).__name__}",
        want="weights that are shared within a block, or outside of all blocks",
        fix="leave the class of the inner one out of FSDP(blocks=...)",
    )


def _own(module: nn.Module) -> list[Tensor]:
    return [
        tensor
        for held in (parameter_dict(module), buffer_dict(module))
        for tensor in held.values()
        if tensor is not None
    ]


def _is_meta(tensor: Tensor) -> bool:
    return tensor.is_meta


def _make(module: nn.Module, device: torch.device, known: dict[int, nn.Parameter]) -> None:
    """Allocate a module's own tensors on the device; a tied parameter stays tied."""
    for name, parameter in parameter_dict(module).items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in known:
                empty = torch.empty_like(parameter, device=device)
                known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter_dict(module)[name] = known[id(parameter)]
    for name, buffer in buffer_dict(module).items():
        if buffer is not None and buffer.is_meta:
            buffer_dict(module)[name] = torch.empty_like(buffer, device=device)
