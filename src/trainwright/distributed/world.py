"""The processes of a run: which one this is, and what all of them say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
TOGETHER = 2**28
"""Bytes of the tensors that one collective takes at most: they are laid end to end for it, in memory of its own."""


class World:
    """One process: it is the whole world, and every answer of its own is everybody's."""

    rank = 0
    """Which process this is, from 0."""
    size = 1
    """How many processes there are."""
    local_rank = 0
    """Which process of its machine this is, from 0."""
    device_index: int | None = None
    """Which device of the machine is this process's own; None where there is no choice to make."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> None:
        """Add `tensors` of one kind up over all processes, in place, in one collective on their device."""

    def total(self, *numbers: float) -> list[float]:
        """The sums over all processes of numbers of the host, in float64, in one collective."""
        return list(numbers)

    def gather(self, value: T) -> list[T]:
        """What every process gives, by rank; on every process. Anything that can be pickled, on the host."""
        return [value]

    def gather_on_main(self, value: T) -> list[T]:
        """Return the value of every rank on rank 0, by rank; an empty list on the others. As `gather` else."""
        return [value]

    def same(self, value: T) -> T:
        """What the first process gives, on every process. Anything that can be pickled, on the host."""
        return value

    def align(self, tensors: Iterable[Tensor]) -> None:
        """Give `tensors` of every process the values that the first one's have, in place."""

    def wait(self) -> None:
        """Wait until every process has come here."""

    def watched(self, tell: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context in which the processes look after each other; `tell` says where this one stands."""
        return nullcontext()

    def failed(self, error: BaseException) -> None:
        """Tell the others that this process ends in `error`; the first one to say so is the one they name."""

    def blame(self, error: BaseException) -> BaseException:
        """Return what an error of this process comes from: DistributedError where it only follows from another's."""
        return error


class Group(World):
    """One of several processes, which have a process group of torch's.

    Every method is for all processes alike, in the same order. What lies on the host goes through gloo, whatever the
    group's own backend is, so that no device is waited for. A process that does not answer for `timeout` seconds ends
    the run.
    """

    def __init__(
        self, group: Any = None, *, local_rank: int = 0, device_index: int | None = None, timeout: float = 300.0
    ) -> None:
        import torch.distributed as dist

        from trainwright.distributed.peer_watch import PeerWatch

        self._dist: Any = dist
        self.group = group
        """The process group; None is torch's default one."""
        self.rank, self.size, self.local_rank = dist.get_rank(group), dist.get_world_size(group), local_rank
        limit = timedelta(seconds=timeout)
        self.host: Any = group if _serves_the_host(dist, group) else dist.new_group(backend="gloo", timeout=limit)
        """The process group for what lies on the host."""
        self.device_index, self.timeout = device_index, timeout
        self._watch = PeerWatch(self)

    @property
    def backend(self) -> str:
        """What the group communicates by: "gloo", "nccl"."""
        name: str = self._dist.get_backend(self.group)
        return name

    def sum(self, *tensors: Tensor) -> None:
        """Add `tensors` of one kind up over all processes, in place, in one collective on their device."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            self._dist.all_reduce(tensors[0], group=self._group_of(tensors[0]))
        elif tensors:
            self._together(tensors, lambda flat: self._dist.all_reduce(flat, group=self._group_of(flat)))

    def total(self, *numbers: float) -> list[float]:
        """The sums over all processes of numbers of the host, in float64, in one collective."""
        import torch

        wide = torch.tensor(numbers, dtype=torch.float64)
        self._dist.all_reduce(wide, group=self.host)
        summed: list[float] = wide.tolist()
        return summed

    def gather(self, value: T) -> list[T]:
        """What every process gives, by rank; on every process. Anything that can be pickled, on the host."""
        gathered: list[Any] = [None] * self.size
        self._dist.all_gather_object(gathered, value, group=self.host)
        return gathered

    def gather_on_main(self, value: T) -> list[T]:
        """Return the value of every rank on rank 0, by rank; an empty list on the others. As `gather` else."""
        gathered: list[Any] = [None] * self.size if self.is_main else []
        self._dist.gather_object(value, gathered if self.is_main else None, group_dst=0, group=self.host)
        return gathered

    def same(self, value: T) -> T:
        """What the first process gives, on every process. Anything that can be pickled, on the host."""
        sent: list[Any] = [value if self.is_main else None]
        self._dist.broadcast_object_list(sent, group_src=0, group=self.host)
        first: T = value if self.is_main else sent[0]
        return first

    def align(self, tensors: Iterable[Tensor]) -> None:
        """Give `tensors` of every process the values that the first one's have, in place."""
        kinds: dict[tuple[Any, Any], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
        for alike in kinds.values():
            for some in neighbours(alike, TOGETHER):
                self._together(some, lambda flat: self._dist.broadcast(flat, group_src=0, group=self._group_of(flat)))

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.total(0)

    def watched(self, tell: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context in which the processes look after each other; `tell` says where this one stands.

        Inside it, a process that does not answer for `timeout` seconds, or that has failed while this one hears
        nothing of it, ends this one: who and where is printed, and it exits with 1.
        """
        return self._watch.during(tell, self.timeout)

    def failed(self, error: BaseException) -> None:
        """Tell the others that this process ends in `error`; the first one to say so is the one they name."""
        self._watch.failed(error)

    def blame(self, error: BaseException) -> BaseException:
        """Return what an error of this process comes from: DistributedError where it only follows from another's.

        An error of this process's own is told to the others, as `failed` does, and comes back as it is.
        """
        return self._watch.blame(error)

    def _group_of(self, tensor: Tensor) -> Any:
        return self.host if tensor.device.type == "cpu" else self.group

    @staticmethod
    def _together(tensors: Sequence[Tensor], do: Any) -> None:
        """Have one collective `do` its work on all tensors of one kind, laid end to end."""
        import torch

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        do(flat)
        start = 0
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()


def neighbours(tensors: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """Lists of neighbours that hold at most `most` bytes together, or one tensor."""
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


def _serves_the_host(dist: Any, group: Any) -> bool:
    """Whether tensors of the host can go through a group."""
    return "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo"
