"""`FSDP(...)`: each rank holds a shard of every weight, gradient and optimizer state, by torch's `fully_shard`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.core.torch_private import (
    buffer_dict,
    fsdp_drop_unsharded_gradients,
    fsdp_groups,
    fsdp_initialize,
    fsdp_reset,
    fsdp_update_dtypes,
    parameter_dict,
    set_versions,
    versions_of,
)
from trainwright.core.trees import parameters_in
from trainwright.distributed.mesh import Parallel, device_mesh
from trainwright.distributed.world import World
from trainwright.modules.dtensors import full_tensor, is_sharded, reshard
from trainwright.modules.matching import module_classes

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@suggests
@dataclass(frozen=True, slots=True)
class FSDP(Parallel):
    """Fully sharded data parallelism: each rank holds a shard of the weights, which are gathered block by block.

    Args:
        blocks: Classes of the modules whose weights are gathered one module at a time, such as a transformer layer.
            Weights outside of all blocks are gathered with the model itself.
        timeout: Seconds to wait for a rank that does not answer; then the run ends.
        backend: Backend of `torch.distributed`. None: nccl on CUDA devices, else gloo.
        reshard_after_forward: Whether gathered weights are freed after a block's forward and gathered again for its
            backward. A number: reshard to this number of ranks. None: True for blocks, False for the model itself.
        policy: torch's `MixedPrecisionPolicy`.
        methods: Methods of the model or of a block, besides `forward`, that a step calls.
    """

    blocks: Collection[type[nn.Module]]
    _: KW_ONLY
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy | None = None
    methods: Collection[str] = ()
    shards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _checked_blocks(self.blocks))
        object.__setattr__(self, "methods", _checked_methods(self.methods))
        after = self.reshard_after_forward
        if not (after is None or isinstance(after, bool) or (isinstance(after, int) and after > 1)):
            want = "True, False, None, or the number of processes within which weights are kept, at least 2"
            raise SettingError(f"FSDP(reshard_after_forward={after!r})", want=want)
        if self.policy is not None and not _is_policy(self.policy):
            fix = "policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), from torch.distributed.fsdp"
            raise SettingError(f"FSDP(policy={self.policy!r})", want="a MixedPrecisionPolicy", fix=fix)
        Parallel.__post_init__(self)

    def __str__(self) -> str:
        names = ", ".join(sorted(block.__name__ for block in self.blocks))
        return f"FSDP(blocks={{{names}}})"


def shard(model: nn.Module, settings: FSDP, world: World, *, device: torch.device) -> None:
    """Shard a model in place over the mesh of `world`: every block, innermost first, then the model itself.

    All ranks call this before optimizers are built. Each module is moved to `device` and gets the weights of rank 0
    just before it is sharded, so that no device holds the complete model. Modules on the meta device are initialized on
    `device` by `reset_parameters`. A model that is already sharded is not changed. SettingError for a model that
    `fully_shard` cannot shard.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    modules = _sharded_modules(model) if isinstance(model, FSDPModule) else chosen(model, settings.blocks)
    called = {name: _having(name, modules) for name in settings.methods}
    if not isinstance(model, FSDPModule):
        if len(placed := {p.device for p in model.parameters()} - {torch.device("meta")}) > 1:
            have = ", ".join(sorted(map(str, placed)))
            what = "a model over several devices, and FSDP holds a process's shards on one"
            raise SettingError(what, have=have, fix='parallel="auto", or a model on one device')
        check_forward(model, modules, calls_methods=any(model in having for having in called.values()))
        check_model(model, modules, processes=world.mesh.shard, reshard_after_forward=settings.reshard_after_forward)
        extra: dict[str, Any] = {} if settings.policy is None else {"mp_policy": settings.policy}
        group = world.host if device.type == "cpu" else world.group
        mesh = device_mesh(world.mesh, group, device.type)
        known: dict[int, nn.Parameter] = {}
        for module in modules:
            first_weights(module, world, device=device, known=known)
            fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, **extra)
        world.broadcast_tensors(model.buffers())
    root: Any = model
    for group in _groups(root):
        if group.mesh_info.mesh.size() != world.mesh.data:
            have = f"a mesh of {group.mesh_info.mesh.size()} of {world.mesh.data} processes"
            what = "the model was sharded over fewer processes than share the data"
            raise SettingError(what, have=have, fix="fully_shard(...) without mesh=, or leave it to FSDP(...)")
    if device.type == "cpu":
        # gloo of torch 2.8 sums float32 and bfloat16 gradients where it is asked for their mean.
        for module in _sharded_modules(model):
            module.set_force_sum_reduction_for_comms(True)
    for name, having in called.items():
        for module in having:
            register_fsdp_forward_method(module, name)
    fsdp_initialize(root)


def set_sync(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward only if it is the `last` one of its window.

    Until then each rank accumulates unsharded gradients. Weights that the settings keep gathered after the forward stay
    gathered until the window ends.
    """
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        resharded = any(group.post_forward_mesh_info is not None for group in fsdp_groups(module))
        module.set_reshard_after_backward(last or resharded, recurse=False)


def recover(model: nn.Module) -> None:
    """Reset gathered weights, unreduced gradients and pending collectives after an error inside a window.

    Called before the first window of a run. Without an earlier error, the model is only resharded.
    """
    root: Any = model
    set_sync(model, True)
    fsdp_reset(root, _sharded_modules(model), _groups(model))
    fsdp_drop_unsharded_gradients(_groups(model))
    reshard(model.modules())


def retake(model: nn.Module) -> None:
    """Update the set of trained parameters, after layers were frozen or unfrozen between epochs."""
    for group in _groups(model):
        fsdp_update_dtypes(group)


def follow(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Reshard the model before each optimizer step, by a pre-hook of the optimizer.

    A forward without a backward leaves weights gathered; the next forward would use them instead of the updated ones.
    """
    modules = _sharded_modules(model)

    def reshard_all(*_: Any) -> None:
        for module in modules:
            module.reshard()

    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(reshard_all)


def full_state_dict(model: nn.Module, world: World) -> dict[str, Any]:
    """Return the model's `state_dict` with complete CPU tensors on rank 0; an empty dict on other ranks.

    All ranks call this; tensors are gathered one by one. Tied weights are one tensor. Buffers are those of rank 0.
    """
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()  # this call also reshards the model
    gathered: dict[Any, Any] = {}
    full: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        key = tied.get(name, name)
        if key not in gathered:
            gathered[key] = _gathered(value, copies=world.is_main)
        full[name] = gathered[key]
    set_versions(full, versions_of(state))
    return full if world.is_main else {}


def _gathered(value: Any, *, copies: bool) -> Any:
    """Return a copy of the complete value on the CPU; None on a rank that only participates in the gathering."""
    if not isinstance(value, Tensor):
        return value
    full = full_tensor(value.detach())
    return full.to("cpu", copy=True) if copies else None


def check_optimizers(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers over parameters that sharding has replaced, or whose gradients FSDP does not average."""
    trained = parameters_in(*optimizers.values())
    plain = [parameter for parameter in trained if not is_sharded(parameter)]
    if not plain:
        return
    ids = {id(parameter) for parameter in trained}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
    if left_out:
        name = next(type(one).__name__ for one in optimizers.values() if not all(map(is_sharded, parameters_in(one))))
        raise SettingError(
            f"the {name} was built on parameters that FSDP has replaced by shards",
            have=f"{len(left_out)} parameters that nothing trains, such as {left_out[0]}",
            want="an optimizer that is built when the model is sharded: a function of the model",
            fix=f"optimizer=lambda model: {name}(model.parameters(), lr=...)",
        )
    raise SettingError(
        "parameters outside the model are trained, and FSDP averages only those of the model",
        have=f"{len(plain)}, such as one of shape {tuple(plain[0].shape)}",
        fix="make the loss with its parameters a part of the model",
    )


def check_precision(settings: FSDP, precision: Any) -> None:
    """Refuse a `policy` and a `precision` that contradict each other, and fp16 weights without a loss scale."""
    kind = None if settings.policy is None else settings.policy.param_dtype
    context = None if precision is None else precision.autocast("cpu")
    cast = context.fast_dtype if isinstance(context, torch.autocast) else None
    if kind == torch.float16 and cast is None:
        raise SettingError(
            "FSDP(policy=...) computes in float16 without a loss scale: small gradients become 0",
            fix='param_dtype=torch.bfloat16, or precision="fp16"',
        )
    if kind is not None and cast is not None and kind != cast:
        have = f"param_dtype={kind} and precision={str(precision)!r}"
        raise SettingError("FSDP(policy=...) and precision= name two types", have=have, want="one of them")


def _checked_blocks(blocks: Any) -> frozenset[type[nn.Module]]:
    found = module_classes(blocks, lambda text: f"FSDP(blocks={text})", empty=True)
    for block in found:
        if issubclass(block, nn.ModuleList | nn.ModuleDict):
            what = f"FSDP(blocks={{{block.__name__}}}): a list of modules has no forward that gathers their weights"
            raise SettingError(what, fix="FSDP(blocks={Block}), with the class of its items")
    return frozenset(found)


def _checked_methods(methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        fix = f"methods=({methods!r},)" if isinstance(methods, str) else 'methods=("encode",)'
        raise SettingError(f"FSDP(methods={methods!r})", want="names of methods", fix=fix)
    names = tuple(methods)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise SettingError(f"FSDP(methods=({name!r},))", want="names of methods", fix='methods=("encode",)')
    return names


def _is_policy(policy: Any) -> bool:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return isinstance(policy, MixedPrecisionPolicy)


def _having(name: str, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the sharded modules with a method `name`, which will gather weights as `forward` does."""
    found = [module for module in modules if callable(getattr(module, name, None))]
    if not found:
        from torch.distributed.fsdp import FSDPModule

        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
        known = {*dir(nn.Module), *dir(FSDPModule)}
        own = [method for kind in kinds for method in vars(kind) if method not in known and not method.startswith("_")]
        what = f"FSDP(methods=({name!r},)): neither the model nor a block has it.{did_you_mean(name, own)}"
        raise SettingError(what, have=", ".join(own[:10]), want="methods that a step calls")
    return found


def _sharded_modules(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(model: nn.Module) -> list[Any]:
    """Return torch's FSDP parameter groups of all sharded modules; each group is gathered as one."""
    return list(dict.fromkeys(group for module in _sharded_modules(model) for group in fsdp_groups(module)))


# Modules to shard, checks before sharding, and initial weights.

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward."""
SHOWN = 12
"""The most classes or modules that an error lists."""


def chosen(model: nn.Module, blocks: Collection[type[nn.Module]]) -> list[nn.Module]:
    """Return the modules to shard: those of the classes `blocks`, inner ones first, then the model.

    SettingError for a class without a module in the model.
    """
    kinds = {type(module) for module in model.modules()}
    for block in blocks:
        if not any(issubclass(kind, block) for kind in kinds):
            names = sorted({kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.")})
            names += sorted({kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")})
            what = f"FSDP(blocks={{{block.__name__}}}): the model has no module of this class"
            raise SettingError(what, have=", ".join(names[:SHOWN]), want="classes of modules that it has")
    found = [module for module in model.modules() if isinstance(module, tuple(blocks)) and module is not model]
    return [*reversed(found), model]  # `modules()` yields a module before its children


def check_model(
    model: nn.Module, modules: Sequence[nn.Module], *, processes: int, reshard_after_forward: bool | int | None
) -> None:
    """Raise SettingError for a parameter that `fully_shard` cannot shard, before anything is changed."""
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
    """Raise SettingError for a model without a forward (a container of networks) if nothing would gather its weights.

    `calls_methods`: whether a method of the model is in `FSDP(methods=...)`.
    """
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
    """Move a module to the device and broadcast rank 0's weights, without its already sharded submodules.

    Tensors on the meta device are allocated there and initialized by `reset_parameters`. `known`: the parameters made
    so far, by the id of the meta parameter, so that tied ones stay tied.
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
    """Yield name and value of the parameters that are gathered with a module; sharded submodules are left out."""
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
    """Allocate a module's own meta tensors on the device; tied parameters stay tied."""
    for name, parameter in parameter_dict(module).items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in known:
                empty = torch.empty_like(parameter, device=device)
                known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter_dict(module)[name] = known[id(parameter)]
    for name, buffer in buffer_dict(module).items():
        if buffer is not None and buffer.is_meta:
            buffer_dict(module)[name] = torch.empty_like(buffer, device=device)
