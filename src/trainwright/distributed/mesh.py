"""The layout of ranks: common settings, and the role of each rank (its rows, its copy or shard of the weights).

The layout is one-dimensional: `DDP` replicates the weights on all ranks, `FSDP` shards them over all ranks. Another
layout, such as HSDP (shards inside a machine, copies between machines), would only change `of_ranks`: data, windows and
FSDP each read their own dimension, and torch's `fully_shard` and checkpoints support two-dimensional meshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from trainwright.core.checks import check_number
from trainwright.core.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Settings that `DDP` and `FSDP` have in common."""

    timeout: float = 300.0
    """Seconds to wait for a rank that does not answer; then the run ends."""
    backend: str | None = None
    """Backend of the process group. None: nccl on CUDA devices, else gloo."""
    shards: ClassVar[bool] = False
    """Whether each rank holds a shard of the weights, so that every forward is a collective."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_number(self.timeout, f"{name}(timeout={self.timeout!r})", above=0, what="seconds, a number")
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise SettingError(f"{name}(backend={self.backend!r})", want='"nccl", "gloo" or None')


def checked_parallel(parallel: Any) -> Parallel:
    """Return the settings of `parallel=`; the defaults for "auto" and None. SettingError for any other value."""
    if parallel is None or (isinstance(parallel, str) and parallel == "auto"):
        return Parallel()
    if isinstance(parallel, Parallel):
        return parallel
    fix = {"ddp": "parallel=DDP()", "fsdp": "parallel=FSDP(blocks={Block})"}.get(str(parallel).lower(), "")
    if isinstance(parallel, type) and issubclass(parallel, Parallel):
        fix = f"parallel={parallel.__name__}()"
    raise SettingError(f"parallel={parallel!r} is no setting", want='"auto", None, DDP(...) or FSDP(...)', fix=fix)


class Mesh(NamedTuple):
    """The role of one rank: its position along the data dimension, and the sizes of all dimensions.

    data = replicate * shard, since every rank has different rows. The shards of one copy of the weights are on
    neighboring ranks.
    """

    rank: int = 0
    """The position along `data`."""
    data: int = 1
    """The number of ranks over which the rows of a batch are split."""
    replicate: int = 1
    """The number of copies of the weights; gradients are averaged over them."""
    shard: int = 1
    """The number of shards of each copy."""


def of_ranks(rank: int, size: int, *, shards: bool) -> Mesh:
    """Return the role of a rank. `shards`: whether ranks hold shards of the weights, as with `FSDP`."""
    return Mesh(rank, size, replicate=1 if shards else size, shard=size if shards else 1)


def device_mesh(mesh: Mesh, group: Any, device_type: str) -> Any:
    """Return the DeviceMesh for `fully_shard`, with the dimensions (shard,) or (replicate, shard)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh.replicate == 1:
        all_ranks: Any = dist.group.WORLD if group is None else group
        return DeviceMesh.from_group(all_ranks, device_type)
    return init_device_mesh(device_type, (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))


class Shard(NamedTuple):
    """Splits the rows of each batch over ranks (`Mesh.shard`, in contrast, is about weights under FSDP).

    A batch is split into contiguous slices of nearly equal size; concatenated in rank order they are the batch. With
    fewer rows than `size * least`, the last ranks get no rows.
    """

    rank: int
    """The rank, from 0."""
    size: int
    """The number of ranks over which a batch is split."""
    least: int = 1
    """The fewest rows of a slice: 2 for BatchNorm, which fails on one row."""

    def served(self, rows: int) -> int:
        """Return the number of ranks that get rows of a batch of `rows`; these are the first ranks."""
        return max(1, min(self.size, rows // self.least))

    def of(self, rows: int) -> range:
        """Return the positions of this rank's rows in a batch of `rows`; an empty range if it has none."""
        served = self.served(rows)
        if self.rank >= served:
            return range(rows, rows)
        return range(rows * self.rank // served, rows * (self.rank + 1) // served)

    def run(self, rows: int) -> range:
        """Return the positions of the rows to run: this rank's rows, or those of rank 0 as a dummy if it has none."""
        return self.of(rows) or range(rows // self.served(rows))

    def sizes(self, rows: int) -> list[int]:
        """Return the number of rows of each rank."""
        return [len(Shard(rank, self.size, self.least).of(rows)) for rank in range(self.size)]

    def layout_text(self, rows: int) -> str:
        """Return the slice sizes as text: "64 = 2 x 32", "64 = 22 + 21 + 21"; with many ranks "10 = 2 x 3 + 2 x 2"."""
        if self.size == 1:
            return f"{rows:,}"
        sizes = sorted(self.sizes(rows), reverse=True)
        kinds = sorted(set(sizes), reverse=True)
        if len(kinds) > 1 and self.size <= 3:
            return f"{rows:,} = {' + '.join(map(str, sizes))}"
        return f"{rows:,} = {' + '.join(f'{sizes.count(kind)} x {kind:,}' for kind in kinds)}"


class Slice(NamedTuple):
    """The part of a batch that one rank runs."""

    batch: Any
    """The rows to run; those of rank 0 as a dummy if this rank has none."""
    rows: int | None
    """The number of rows that count: 0 for a dummy. None: all rows of `batch` (a stream)."""
    all_rows: int | None
    """The number of rows over all ranks. None: unknown (a stream)."""
