"""The rank of this process and its collectives: `World` for a single rank, `ProcessGroupWorld` for one of several."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainwright.distributed.mesh import Mesh, of_ranks

T = TypeVar("T")
FLAT_BYTES = 2**28
"""The most bytes of one broadcast, for which tensors are copied into one flat tensor."""


class World:
    """A single rank: each collective returns its own value."""

    rank = 0
    """The rank of this process, from 0."""
    size = 1
    """The world size."""
    local_rank = 0
    """The rank of this process on its machine, from 0."""
    device_index: int | None = None
    """The index of this rank's device; None if the device has no index."""
    group: Any = None
    """The process group for collectives of the model; None for the default group."""
    host: Any = None
    """The process group for values on the host; None for the default group."""
    mesh = Mesh()
    """The role of this rank: its rows of the data, its copy or shard of the weights."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def all_reduce(self, *tensors: Tensor) -> None:
        """Sum `tensors` of one device and dtype over all ranks, in place, in one collective on their device."""

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks of numbers on the host, in float64, in one collective."""
        return list(numbers)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank; any value that can be pickled."""
        return [value]

    def gather_on_rank0(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on rank 0; an empty list on the others."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank; any value that can be pickled."""
        return value

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 into those of the other ranks, in place."""

    def watch(self, position: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context in which the ranks watch each other; `position` describes this rank's progress."""
        return nullcontext()

    def report_error(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends in `error`; they name the rank that reports first."""

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error of this rank: a DistributedError if another rank caused it."""
        return error


class ProcessGroupWorld(World):
    """One rank of a process group of torch.

    All ranks call the methods in the same order. Values on the host are sent by gloo, whatever the backend of the
    group, so that no call waits for a device. If a rank does not answer for `timeout` seconds, the run ends.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        local_rank: int = 0,
        device_index: int | None = None,
        timeout: float = 300.0,
        shards: bool = False,
    ) -> None:
        import torch.distributed as dist

        from trainwright.distributed.peer_watch import PeerWatch

        self._dist: Any = dist
        self.group = group
        """The process group; None for the default group."""
        self.rank, self.size, self.local_rank = dist.get_rank(group), dist.get_world_size(group), local_rank
        limit = timedelta(seconds=timeout)
        self.host: Any = group if _takes_host_tensors(dist, group) else dist.new_group(backend="gloo", timeout=limit)
        """The process group for values on the host, with gloo."""
        self.device_index, self.timeout = device_index, timeout
        self.mesh = of_ranks(self.rank, self.size, shards=shards)
        self._watch = PeerWatch(self)

    @property
    def backend(self) -> str:
        """The backend of the group: "gloo", "nccl"."""
        name: str = self._dist.get_backend(self.group)
        return name

    def all_reduce(self, *tensors: Tensor) -> None:
        """Sum `tensors` of one device and dtype over all ranks, in place, in one collective on their device."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            self._dist.all_reduce(tensors[0], group=self._group_of(tensors[0]))
        elif tensors:
            self._flat(tensors, lambda flat: self._dist.all_reduce(flat, group=self._group_of(flat)))

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks of numbers on the host, in float64, in one collective."""
        wide = torch.tensor(numbers, dtype=torch.float64)
        self._dist.all_reduce(wide, group=self.host)
        summed: list[float] = wide.tolist()
        return summed

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank; any value that can be pickled."""
        gathered: list[Any] = [None] * self.size
        self._dist.all_gather_object(gathered, value, group=self.host)
        return gathered

    def gather_on_rank0(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on rank 0; an empty list on the others."""
        gathered: list[Any] = [None] * self.size if self.is_main else []
        self._dist.gather_object(value, gathered if self.is_main else None, group_dst=0, group=self.host)
        return gathered

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank; any value that can be pickled."""
        sent: list[Any] = [value if self.is_main else None]
        self._dist.broadcast_object_list(sent, group_src=0, group=self.host)
        first: T = value if self.is_main else sent[0]
        return first

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of rank 0 into those of the other ranks, in place."""
        kinds: dict[tuple[Any, Any], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
        for alike in kinds.values():
            for some in split_by_bytes(alike, FLAT_BYTES):
                self._flat(some, lambda flat: self._dist.broadcast(flat, group_src=0, group=self._group_of(flat)))

    def watch(self, position: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context in which the ranks watch each other; `position` describes this rank's progress.

        When a rank fails, or is silent for `timeout` seconds, the next collective of the other ranks raises
        DistributedError with that rank and its line. A rank that is still blocked GUARD_GRACE seconds later exits with
        code 1.
        """
        return self._watch.during(position, self.timeout)

    def report_error(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends in `error`; they name the rank that reports first."""
        self._watch.report_error(error)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error of this rank: a DistributedError if another rank caused it.

        Any other error is reported to the other ranks, as by `report_error`, and returned unchanged.
        """
        return self._watch.cause_of(error)

    def _group_of(self, tensor: Tensor) -> Any:
        return self.host if tensor.device.type == "cpu" else self.group

    @staticmethod
    def _flat(tensors: Sequence[Tensor], do: Any) -> None:
        """Run a collective on one flat copy of all tensors, and copy the result back."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        do(flat)
        start = 0
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()


def split_by_bytes(tensors: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """Split tensors into consecutive lists of at most `most` bytes each; a larger tensor is a list by itself."""
    cut: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if cut[-1] and size + own > most:
            cut.append([])
            size = 0
        cut[-1].append(tensor)
        size += own
    return cut


def _takes_host_tensors(dist: Any, group: Any) -> bool:
    """Whether a group supports tensors on the host."""
    return "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo"


def packed(value: Any) -> bytes:
    """Pickle a value for another rank: of a view only its elements, not the complete storage."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytes, device: torch.device | None = None) -> Any:
    """Return a value that another rank has packed. Tensors from an accelerator are moved to `device`, if given."""
    return _Unpacker(io.BytesIO(data), device).load()


class _Packer(pickle.Pickler):
    """Copies views, and tensors on accelerators, to new host tensors."""

    def persistent_id(self, value: Any) -> tuple[bool, Tensor] | None:
        """Return whether a tensor is on an accelerator, and its copy; None for values that are pickled normally."""
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        if not value.is_cpu:
            return True, value.detach().cpu()
        return (False, value.detach().clone()) if _is_view(value) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device | None) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, sent: tuple[bool, Tensor]) -> Tensor:
        """Return a tensor, on the accelerator if it was on one."""
        elsewhere, tensor = sent
        return tensor.to(self._device) if elsewhere and self._device is not None else tensor


def _is_view(tensor: Tensor) -> bool:
    """Whether the storage holds more than the tensor, or the tensor requires a gradient."""
    return tensor.requires_grad or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
