"""`DDP(...)`: torch's DistributedDataParallel around a module whose forward is the step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trainwright.core.checks import check_number
from trainwright.core.errors import SettingError, StepError
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, check_reducer_finalized
from trainwright.distributed.mesh import Parallel
from trainwright.distributed.world import Group

COMPRESSIONS = ("bf16", "fp16")


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(Parallel):
    """Data parallelism on several ranks: each has a complete model, and gradients are averaged.

    Args:
        timeout: Seconds after which a rank that does not answer ends the run.
        backend: The backend of `torch.distributed`. None: nccl on CUDA devices, else gloo.
        find_unused_parameters: Whether some parameters may get no gradient. "auto" looks at the first window.
        static_graph: Whether the same parameters are used in the same order in every step.
        gradient_as_bucket_view: Whether gradients are views of the buckets.
        bucket_mb: The size of a bucket in MB. None: that of torch.
        compress: "bf16" or "fp16": reduce gradients in this dtype (bf16 only on nccl).
        sync_batchnorm: Whether BatchNorm layers normalize over the rows of all ranks. They become torch's
            SyncBatchNorm, in place.
        sync_buffers: Whether rank 0's buffers are broadcast before each update, as in torch's DDP. Otherwise every rank
            trains with its own, and those of rank 0 are evaluated and saved.
        same_noise: Whether all ranks draw the same random numbers.
    """

    find_unused_parameters: bool | Literal["auto"] = "auto"
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_mb: float | None = None
    compress: Literal["bf16", "fp16"] | None = None
    sync_batchnorm: bool = False
    sync_buffers: bool = False
    same_noise: bool = False

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
        Parallel.__post_init__(self)


class Wrapped:
    """A module wrapped by torch's DDP."""

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
        """Whether this is the first window, in which torch records the graph and averages after each micro-batch."""
        if settings.compress is not None:
            _compress(self.ddp, settings.compress, world)

    def __call__(self, batch: Any, *, last: bool) -> Any:
        """Run the forward; gradients are averaged in the backward of the `last` micro-batch of a window alone.

        In the first window of a static graph they are averaged in each: torch records the graph where it averages.
        """
        if last or self._records:
            self._records = self._records and not last
            return self.ddp(batch)
        with self.ddp.no_sync():
            return self.ddp(batch)

    def check(self) -> None:
        """Raise StepError where a bucket still waits for the gradient of a parameter that was not used."""
        try:
            check_reducer_finalized(self.ddp)
        except RuntimeError as error:
            raise StepError(
                "parameters without a gradient in this update, which were used before: the gradients of the "
                "processes were not averaged",
                want="the same parameters in each update, or find_unused_parameters",
                fix="Trainer(..., parallel=DDP(find_unused_parameters=True))",
            ) from error


def convert_batchnorm(model: nn.Module, world: Group, *, device: torch.device) -> None:
    """Convert every BatchNorm layer of `model` to SyncBatchNorm, in place.

    SettingError on the CPU, where torch has none, and for a model that is a BatchNorm layer itself.
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
