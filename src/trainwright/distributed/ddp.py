"""`DDP(...)`: torch's DistributedDataParallel around a module whose forward is the step."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from trainwright.core.checks import check_number
from trainwright.core.errors import SettingError, StepError
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, check_reducer_finalized
from trainwright.distributed.world import Group

COMPRESSIONS = ("bf16", "fp16")


@suggests
@dataclass(frozen=True, slots=True)
class DDP:
    """How several processes share the work of an update: each has the whole model, and gradients are averaged.

    `find_unused_parameters`: whether some parameters may get no gradient; "auto" looks at the first window.
    `static_graph`: the same parameters are used in the same order in every step. `gradient_as_bucket_view`: gradients
    lie in the memory that is communicated. `bucket_mb`: the size of what is communicated at once; None: torch's.
    `compress`: "bf16" or "fp16": gradients are rounded while they travel (bf16 only on nccl). `sync_batchnorm`:
    BatchNorm layers normalise over the rows of all processes; they become torch's SyncBatchNorm, in place.
    `sync_buffers`: rank 0's buffers are taken over before each update, as in torch's DDP; else every rank trains with
    its own and rank 0's are those that are evaluated and saved. `same_noise`: all ranks draw the same random numbers.
    `timeout`: seconds after which a process that does not answer ends the run. `backend`: None is nccl on CUDA devices,
    else gloo.
    """

    _: KW_ONLY
    find_unused_parameters: bool | Literal["auto"] = "auto"
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_mb: float | None = None
    compress: Literal["bf16", "fp16"] | None = None
    sync_batchnorm: bool = False
    sync_buffers: bool = False
    same_noise: bool = False
    timeout: float = 300.0
    backend: str | None = None
    shards: ClassVar[bool] = False
    """Whether each process holds a part of the weights, so that every forward is one of all processes."""

    def __post_init__(self) -> None:
        flags = ("static_graph", "gradient_as_bucket_view", "sync_batchnorm", "sync_buffers", "same_noise")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"DDP({name}={getattr(self, name)!r})", want="True or False")
        if self.find_unused_parameters not in (True, False, "auto"):
            have = f"DDP(find_unused_parameters={self.find_unused_parameters!r})"
            raise SettingError(have, want='True, False or "auto"')
        if self.compress not in (None, *COMPRESSIONS):
            raise SettingError(f"DDP(compress={self.compress!r})", want='"bf16", "fp16" or None')
        if self.bucket_mb is not None:
            check_number(self.bucket_mb, f"DDP(bucket_mb={self.bucket_mb!r})", above=0, what="megabytes, a number")
        check_number(self.timeout, f"DDP(timeout={self.timeout!r})", above=0, what="seconds, a number")
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise SettingError(f"DDP(backend={self.backend!r})", want='"nccl", "gloo" or None')


class Wrapped:
    """A module under torch's DDP; called, it runs the module's forward."""

    def __init__(self, module: nn.Module, settings: DDP, world: Group, *, unused: bool) -> None:
        from torch.nn.parallel import DistributedDataParallel

        extra: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_cap_mb": settings.bucket_mb}
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        extra["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        parameter = next(module.parameters())
        self.unused = unused
        """Whether parameters may get no gradient."""
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[parameter.device] if _on_one_device(module) else None,
            process_group=world.group,
            init_sync=False,  # the run has given every rank the weights of the first
            find_unused_parameters=unused,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
            **extra,
        )
        self._records = settings.static_graph
        """Whether the graph is still to be recorded, by a first window in which every micro-batch is averaged."""
        if settings.compress is not None:
            _compress(self.ddp, settings.compress, world)

    def __call__(self, batch: Any, *, last: bool) -> Any:
        """Run the forward; gradients are averaged in the backward of the window's `last` micro-batch alone.

        In the first window of a static graph all of them are: torch records the graph where it averages.
        """
        with nullcontext() if last or self._records else self.ddp.no_sync():
            returned = self.ddp(batch)
        self._records = self._records and not last
        return returned

    def check(self) -> None:
        """Refuse gradients of which some still wait for those of a parameter that was not used; StepError."""
        try:
            check_reducer_finalized(self.ddp)
        except RuntimeError as error:
            raise StepError(
                "parameters without a gradient in this update, which were used before: the gradients of the "
                "processes were not averaged",
                want="the same parameters in each update, or to be told otherwise",
                fix="Trainer(..., parallel=DDP(find_unused_parameters=True))",
            ) from error


def in_sync(model: nn.Module, world: Group, *, device: torch.device) -> None:
    """Make every BatchNorm layer of `model` one that normalises over all processes, in place.

    SettingError on the CPU, where torch has none, and for a model that is such a layer itself.
    """
    if not any(_is_norm(module) for module in model.modules()):
        return
    if device.type == "cpu" or _is_norm(model):
        have = "a model that is a BatchNorm layer itself" if _is_norm(model) else "a model on the cpu"
        what = "DDP(sync_batchnorm=True): torch's SyncBatchNorm, which takes a layer's place"
        fix = "DDP() without sync_batchnorm: each process normalises over its own rows"
        raise SettingError(what, have=have, want="BatchNorm layers inside a model on an accelerator", fix=fix)
    _convert(model, world)


def _convert(model: nn.Module, world: Group) -> None:
    for name, child in list(model.named_children()):
        if _is_norm(child):
            made = nn.SyncBatchNorm.convert_sync_batchnorm(child, world.group)
            made.training = child.training
            setattr(model, name, made)
        else:
            _convert(child, world)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _compress(ddp: Any, kind: str, world: Group) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.bf16_compress_hook if kind == "bf16" else default_hooks.fp16_compress_hook
    try:
        ddp.register_comm_hook(world.group, hook)
    except (TypeError, ValueError, RuntimeError) as error:
        backend = world.backend
        raise SettingError(
            f'DDP(compress="{kind}"): {backend} cannot: {error}',
            want="bf16 on nccl, or fp16",
            fix='DDP(compress="fp16")' if kind == "bf16" else "DDP() without compress",
        ) from error


def _on_one_device(module: nn.Module) -> bool:
    devices = {parameter.device for parameter in module.parameters()}
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and torch.cuda.is_available()
