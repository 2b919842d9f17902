"""`DDP(...)`: wraps the training step in torch's DistributedDataParallel, or averages complete gradients itself."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainwright.core.checks import check_choice, check_flag, check_number
from trainwright.core.errors import SettingError, StepError
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, check_reducer_finalized, version_of
from trainwright.distributed.mesh import Parallel
from trainwright.distributed.world import ProcessGroupWorld, World, split_by_bytes

COMPRESSIONS = ("bf16", "fp16")


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class DDP(Parallel):
    """Data parallelism: each rank holds a complete copy of the model, and gradients are averaged over the ranks.

    Args:
        timeout: Seconds to wait for a rank that does not answer; then the run ends.
        backend: Backend of `torch.distributed`. None: nccl on CUDA devices, else gloo.
        find_unused_parameters: Whether some parameters may get no gradient. "auto" finds out in the first window.
        static_graph: Whether every step uses the same parameters in the same order.
        gradient_as_bucket_view: Whether gradients are views of the buckets.
        bucket_mb: Size of a bucket in MB. None: torch's default.
        compress: "bf16" or "fp16": reduce gradients in this dtype. "bf16" requires nccl.
        sync_batchnorm: Whether BatchNorm layers normalize over the rows of all ranks. The layers are converted to
            torch's SyncBatchNorm, in place.
        sync_buffers: Whether rank 0's buffers are broadcast before each update, as in torch's DDP. Otherwise every rank
            trains with its own buffers; those of rank 0 are evaluated and saved.
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
        for name in ("static_graph", "gradient_as_bucket_view", "sync_batchnorm", "sync_buffers", "same_noise"):
            check_flag(getattr(self, name), f"DDP({name}={getattr(self, name)!r})")
        check_choice(self.find_unused_parameters, "DDP", "find_unused_parameters", choices=(True, False, "auto"))
        check_choice(self.compress, "DDP", "compress", choices=(*COMPRESSIONS, None))
        if self.bucket_mb is not None:
            check_number(self.bucket_mb, f"DDP(bucket_mb={self.bucket_mb!r})", above=0, what="megabytes, a number")
        Parallel.__post_init__(self)


class Wrapped:
    """A module wrapped by torch's DDP."""

    def __init__(self, module: nn.Module, settings: DDP, world: ProcessGroupWorld, *, unused: bool) -> None:
        from torch.nn.parallel import DistributedDataParallel

        extra: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_cap_mb": settings.bucket_mb}
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        extra["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        parameter = next(module.parameters())
        self.unused = unused
        """Whether some parameters may get no gradient."""
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[parameter.device] if _on_one_device(module) else None,
            process_group=world.group,
            init_sync=False,  # the weights of rank 0 were broadcast before
            find_unused_parameters=unused,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
            **extra,
        )
        self._records = settings.static_graph
        """Whether torch still records the static graph, in the first window: it averages after each micro-batch."""
        if settings.compress is not None:
            _compress(self.ddp, settings.compress, world)

    def __call__(self, batch: Any, *, last: bool) -> Any:
        """Run the forward; average gradients in the backward of the `last` micro-batch of a window only.

        In the first window of a static graph every backward averages: torch records the graph only then.
        """
        if last or self._records:
            self._records = self._records and not last
            return self.ddp(batch)
        with self.ddp.no_sync():
            return self.ddp(batch)

    def check(self) -> None:
        """Raise StepError if a bucket still waits for the gradient of an unused parameter."""
        try:
            check_reducer_finalized(self.ddp)
        except RuntimeError as error:
            raise StepError(
                "parameters without a gradient in this update, which were used before: the gradients of the "
                "processes were not averaged",
                want="the same parameters in each update, or find_unused_parameters",
                fix="Trainer(..., parallel=DDP(find_unused_parameters=True))",
            ) from error


def convert_batchnorm(model: nn.Module, world: ProcessGroupWorld, *, device: torch.device) -> None:
    """Convert every BatchNorm layer of `model` to SyncBatchNorm, in place.

    SettingError on the CPU, where torch has no SyncBatchNorm, and for a model that is itself a BatchNorm layer.
    """
    if not any(_is_norm(module) for module in model.modules()):
        return
    if device.type == "cpu" or _is_norm(model):
        have = "a model that is a BatchNorm layer itself" if _is_norm(model) else "a model on the cpu"
        what = "DDP(sync_batchnorm=True): torch's SyncBatchNorm, which takes a layer's place"
        fix = "DDP() without sync_batchnorm: each process normalizes over its own rows"
        raise SettingError(what, have=have, want="BatchNorm layers inside a model on an accelerator", fix=fix)
    nn.SyncBatchNorm.convert_sync_batchnorm(model, world.group)  # in place, except for a bare BatchNorm layer


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _compress(ddp: Any, kind: str, world: ProcessGroupWorld) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.bf16_compress_hook if kind == "bf16" else default_hooks.fp16_compress_hook
    try:
        if kind == "bf16" and world.backend == "gloo":  # torch itself looks at the build, not at the backend
            raise ValueError("it does not reduce bf16")
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


# Averages of complete gradients over the ranks, in few collectives.

BYTES = 25 * 2**20
"""Default size of a bucket in bytes, as in torch's DDP."""
_WIDE = (torch.float32, torch.float64)


class GradientBuckets:
    """Buckets of parameters for gradient averaging: one device and dtype, and one collective, per bucket."""

    def __init__(self, parameters: Iterable[Tensor], world: World, *, bucket_mb: float | None = None) -> None:
        self._world = world
        self._buckets: list[list[Tensor]] = []
        most = BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for alike in kinds.values():
            self._buckets += split_by_bytes(alike, most)
        self._buckets.sort(key=lambda bucket: bucket[0].dtype not in _WIDE)  # the first one also reduces `carried`
        self._found: list[Tensor] = []
        """By bucket: the fraction of ranks with a gradient, for each parameter."""
        self._read: list[float] | None = None

    @property
    def unused(self) -> bool:
        """Whether some parameter had no gradient on some rank in the last `average`. Waits for the device."""
        return any(share < 1 - 0.5 / self._world.size for share in self._shares())

    def average(self, carried: Tensor) -> Tensor:
        """Replace every gradient by its mean over the ranks; return the mean of `carried`, a tensor of two numbers.

        A missing gradient counts as 0 if another rank has one, and stays None if no rank has one. Only a rank with
        missing gradients reads from the device, once.
        """
        self._found, self._read = [], None
        missing: list[tuple[int, Tensor, Tensor]] = []
        waits, position = True, itertools.count()
        for bucket in self._buckets:
            rides = waits and bucket[0].dtype in _WIDE
            *means, found, summed = self._mean(bucket, carried if rides else carried[:0])
            self._found.append(found.clone())  # a view would hold the memory of the complete bucket
            for parameter, mean, index in zip(bucket, means, position, strict=False):
                if parameter.grad is None:
                    missing.append((index, parameter, mean))
                else:
                    _take(parameter, mean)
            if rides:
                carried, waits = summed, False
        for index, parameter, mean in missing:
            if self._shares()[index]:
                _take(parameter, mean)
        if waits:
            carried = carried / self._world.size
            self._world.all_reduce(carried)
        return carried

    def _mean(self, bucket: list[Tensor], carried: Tensor) -> tuple[Tensor, ...]:
        """Return the mean gradients of a bucket, the fractions of ranks with a gradient, and the mean of `carried`."""
        dense = [_dense(parameter) for parameter in bucket]
        like = dense[0]
        if all(parameter.grad is not None for parameter in bucket):
            has = like.new_ones(len(bucket))
        else:
            has = like.new_tensor([float(parameter.grad is not None) for parameter in bucket])
        flat = torch.cat([*[part.reshape(-1) for part in dense], has, carried.to(like.device, like.dtype)])
        flat.div_(self._world.size)  # before the sum, as torch's DDP does
        self._world.all_reduce(flat)
        pieces: tuple[Tensor, ...] = flat.split([*[part.numel() for part in dense], len(bucket), len(carried)])
        return pieces

    def _shares(self) -> list[float]:
        """Return the fraction of ranks with a gradient, for each parameter; read once after each `average`."""
        if self._read is None:
            device = self._found[0].device if self._found else None
            found = [one.to(device, torch.float32) for one in self._found]
            shares: list[float] = torch.cat(found).tolist() if found else []
            self._read = shares
        return self._read


def _dense(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter as a dense, contiguous, real tensor; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
    elif gradient.is_sparse:
        gradient = gradient.to_dense()
    real: Tensor = torch.view_as_real(gradient.contiguous()) if gradient.is_complex() else gradient
    return real


def _take(parameter: Tensor, mean: Tensor) -> None:
    """Set the gradient of a parameter to the mean, in place if it has a gradient."""
    shaped = mean.view(*parameter.shape, 2) if parameter.is_complex() else mean.view(parameter.shape)
    shaped = torch.view_as_complex(shaped) if parameter.is_complex() else shaped
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = shaped.clone()
    elif gradient.is_sparse:
        parameter.grad = shaped.to_sparse(gradient.sparse_dim())
    else:
        with torch.no_grad():
            gradient.copy_(shaped)


def fingerprint(parameters: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    """Return identity and version of each gradient, by parameter; they differ once a gradient was made or changed."""
    return {id(p): (0, 0) if p.grad is None else (id(p.grad), version_of(p.grad)) for p in parameters}
