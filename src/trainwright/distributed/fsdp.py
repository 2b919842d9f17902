"""`FSDP(...)`: torch's `fully_shard`: each process holds a shard of every weight, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.checks import check_number
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.core.torch_private import (
    fsdp_drop_unsharded_gradients,
    fsdp_groups,
    fsdp_initialize,
    fsdp_reset,
    fsdp_update_dtypes,
)
from trainwright.core.trees import parameters_in
from trainwright.distributed.world import World
from trainwright.modules.dtensors import is_sharded, reshard

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@suggests
@dataclass(frozen=True, slots=True)
class FSDP:
    """How several processes hold one model: each a shard of its weights, which are gathered block by block as needed.

    `blocks`: the classes of the modules that are gathered one at a time, such as a transformer's layer; what lies in
    none of them is gathered with the model itself. `reshard_after_forward`: whether gathered weights are given up
    after a block's forward and gathered again for its backward; a number: kept within so many processes; None: given
    up in blocks, kept in the model itself. `policy`: torch's `MixedPrecisionPolicy`. `methods`: the methods of the
    model, or of a block, that are called in a step beside `forward`. `timeout`: seconds after which a process that
    does not answer ends the run. `backend`: None is nccl on CUDA devices, else gloo.
    """

    blocks: Collection[type[nn.Module]]
    _: KW_ONLY
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy | None = None
    methods: Collection[str] = ()
    timeout: float = 300.0
    backend: str | None = None
    shards: ClassVar[bool] = True
    """Whether each process holds a part of the weights, so that every forward is one of all processes."""
    needs_group: ClassVar[bool] = True
    """Shards lie in a process group, also where there is one process."""
    # The settings of DDP that FSDP does not have.
    find_unused_parameters: ClassVar[bool | str] = "auto"
    bucket_mb: ClassVar[float | None] = None
    compress: ClassVar[str | None] = None
    sync_buffers: ClassVar[bool] = False
    same_noise: ClassVar[bool] = False

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
        check_number(self.timeout, f"FSDP(timeout={self.timeout!r})", above=0, what="seconds, a number")
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise SettingError(f"FSDP(backend={self.backend!r})", want='"nccl", "gloo" or None')

    def __str__(self) -> str:
        names = ", ".join(sorted(block.__name__ for block in self.blocks))
        return f"FSDP(blocks={{{names}}})"


def shard(model: nn.Module, settings: FSDP, world: World, *, device: torch.device) -> None:
    """Shard a model in place over the processes of `world`: every block, innermost first, then the model itself.

    Called on all processes, before optimizers are built. Each module is moved to `device` just before it is sharded,
    so that no device holds the whole model, and has the weights of the first process. A model on the meta device gets
    its first weights there, from `reset_parameters`. A model that `fully_shard` was called on already is taken as it
    is. SettingError for what cannot be sharded.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    from trainwright.distributed.sharded_blocks import check_forward, check_model, chosen, first_weights

    modules = _sharded_modules(model) if isinstance(model, FSDPModule) else chosen(model, settings.blocks)
    called = {name: _having(name, modules) for name in settings.methods}
    if not isinstance(model, FSDPModule):
        if len(placed := {p.device for p in model.parameters()} - {torch.device("meta")}) > 1:
            have = ", ".join(sorted(map(str, placed)))
            what = "a model over several devices, and FSDP holds a process's shards on one"
            raise SettingError(what, have=have, fix='parallel="auto", or a model on one device')
        check_forward(model, modules, calls_methods=any(model in having for having in called.values()))
        check_model(model, modules, processes=world.size, keep_within=settings.reshard_after_forward)
        extra: dict[str, Any] = {} if settings.policy is None else {"mp_policy": settings.policy}
        mesh = _mesh(world, device)
        known: dict[int, nn.Parameter] = {}
        for module in modules:
            first_weights(module, world, device=device, known=known)
            fully_shard(module, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, **extra)
        world.align(model.buffers())
    root: Any = model
    for group in _groups(root):
        if group.mesh_info.mesh.size() != world.size:
            have = f"a mesh of {group.mesh_info.mesh.size()} of {world.size} processes"
            what = "the model was sharded over fewer processes than share the data"
            raise SettingError(what, have=have, fix="fully_shard(...) without mesh=, or leave it to FSDP(...)")
    for name, having in called.items():
        for module in having:
            register_fsdp_forward_method(module, name)
    fsdp_initialize(root)


def set_sync(model: nn.Module, last: bool) -> None:
    """Say whether the coming micro-batch is its window's last: gradients are averaged over the processes only there.

    Until then each process adds up whole gradients of its own. Weights that stay whole after a forward by the settings
    stay so until the window ends.
    """
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        given_up = any(group.post_forward_mesh_info is not None for group in fsdp_groups(module))
        module.set_reshard_after_backward(last or given_up, recurse=False)


def recover(model: nn.Module) -> None:
    """Forget a window that was broken off by an error: gathered weights, gradients not yet averaged, what was awaited.

    Called before the first window of a run; on a model in order it changes nothing but that it holds its shards.
    """
    root: Any = model
    set_sync(model, True)
    fsdp_reset(root, _sharded_modules(model), _groups(model))
    fsdp_drop_unsharded_gradients(_groups(model))
    reshard(model.modules())


def retake(model: nn.Module) -> None:
    """Take over what is trained now: layers may be frozen or set free between epochs."""
    for group in _groups(model):
        fsdp_update_dtypes(group)


def follow(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Have the model hold its shards before each step of its optimizers, whoever makes it.

    A forward without a backward leaves whole weights in it, which the next forward would take for the stepped ones.
    """
    modules = _sharded_modules(model)

    def hold_shards(*_: Any) -> None:
        for module in modules:
            module.reshard()

    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(hold_shards)


def check_optimizers(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers over parameters that sharding has replaced, and over some that it does not average."""
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
    cast = getattr(context, "fast_dtype", None)
    if kind == torch.float16 and cast is None:
        raise SettingError(
            "FSDP(policy=...) computes in float16 without a loss scale: small gradients become 0",
            fix='param_dtype=torch.bfloat16, or precision="fp16"',
        )
    if kind is not None and cast is not None and kind != cast:
        have = f"param_dtype={kind} and precision={str(precision)!r}"
        raise SettingError("FSDP(policy=...) and precision= name two types", have=have, want="one of them")


def _checked_blocks(blocks: Any) -> frozenset[type[nn.Module]]:
    fix = "FSDP(blocks={Block}), with the class of the model's layers"
    if isinstance(blocks, type | str | nn.Module) or not isinstance(blocks, Iterable):
        name = getattr(blocks if isinstance(blocks, type) else type(blocks), "__name__", "Block")
        fix = f"FSDP(blocks={{{name}}})" if isinstance(blocks, type | nn.Module) else fix
        raise SettingError(f"FSDP(blocks={_short(blocks)})", want="a set of classes of modules", fix=fix)
    found = frozenset(blocks)
    for block in found:
        if not isinstance(block, type) or not issubclass(block, nn.Module):
            fix = f"FSDP(blocks={{{type(block).__name__}}})" if isinstance(block, nn.Module) else fix
            what = f"FSDP(blocks={{{_short(block)}}})"
            raise SettingError(what, want="classes of modules", fix=fix)
        if issubclass(block, nn.ModuleList | nn.ModuleDict):
            what = f"FSDP(blocks={{{block.__name__}}}): a list of modules has no forward that gathers their weights"
            raise SettingError(what, fix="FSDP(blocks={Block}), with the class of its items")
    return found


def _checked_methods(methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        fix = f"methods=({methods!r},)" if isinstance(methods, str) else 'methods=("encode",)'
        raise SettingError(f"FSDP(methods={methods!r})", want="names of methods", fix=fix)
    names = tuple(methods)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            what = f"FSDP(methods=({_short(name)},))"
            raise SettingError(what, want="names of methods", fix='methods=("encode",)')
    return names


def _short(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(...)"
    return value.__name__ if isinstance(value, type) else repr(value)


def _is_policy(policy: Any) -> bool:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return isinstance(policy, MixedPrecisionPolicy)


def _mesh(world: World, device: torch.device) -> Any:
    """All processes in a row, over the group that serves this device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group: Any = getattr(world, "host" if device.type == "cpu" else "group", None)
    known: Any = dist.group.WORLD if group is None else group
    return DeviceMesh.from_group(known, device.type)


def _having(name: str, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that have a method which is to gather weights as `forward` does: the model, or its blocks."""
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
    """What torch keeps of the parameters that are gathered together, for all sharded modules."""
    return list(dict.fromkeys(group for module in _sharded_modules(model) for group in fsdp_groups(module)))
