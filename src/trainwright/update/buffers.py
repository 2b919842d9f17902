"""What forwards change besides the weights: copied before each update, restored where the update is not applied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core import host_reads
from trainwright.core.trees import inside
from trainwright.modules.modes import running_statistics


class Statistics:
    """The running statistics of normalisation layers as they were before the update in hand."""

    def __init__(self, model: nn.Module, *, keeps: bool, updates: int = 1) -> None:
        """`updates`: before how many of the last ones they are known."""
        self._own = running_statistics(model) if keeps else []
        kinds: dict[Any, list[Tensor]] = defaultdict(list)  # a kernel copies those of one kind together
        for statistic in self._own:
            kinds[statistic.device, statistic.dtype].append(statistic)
        self.alike = list(kinds.values())
        """The statistics of each device and type."""
        self.keeps = bool(self.alike)
        """Whether there is anything to copy before an update."""
        self._kept = [[[one.clone() for one in kind] for kind in self.alike] for _ in range(updates)]
        self.kept = 0
        """How often they were kept."""

    def keep(self) -> None:
        """Keep them as they are before an update."""
        self.kept += 1
        for kept, statistics in zip(self._kept[self.kept % len(self._kept)], self.alike, strict=True):
            torch._foreach_copy_(kept, statistics)

    def put_back(self, *, ago: int = 0) -> None:
        """Make them what they were before the update in hand, or before the one so many updates ago."""
        for kept, statistics in zip(self._kept[(self.kept - ago) % len(self._kept)], self.alike, strict=True):
            torch._foreach_copy_(statistics, kept)

    def mend(self) -> None:
        """Put back statistics that are not finite: where a scaler skips they advance, but these would stay so.

        A step up an overflowed gradient makes them, as SAM takes one.
        """
        if self.alike and not all(host_reads.read([torch.isfinite(one).all() for one in self._own])):
            self.put_back()


class Buffers:
    """Every buffer of some modules as it was before the update in hand: a skipped update restores all of them.

    A forward may write into a buffer, also through `.data`, which no version counter sees; it may assign another tensor
    to it, register it or remove it. So each is copied before each update, into storage that is allocated once.
    """

    keeps = True
    """Whether there is anything to copy before an update: a forward may register the first buffer."""

    def __init__(self) -> None:
        self.kept = 0
        """How often they were copied."""
        self._modules: list[nn.Module] = []
        self._signature: list[tuple[int, torch.Size]] | None = None
        """Which tensors were there, and of what shapes, when the storage was arranged."""
        self._layout: list[tuple[MutableMapping[str, Tensor | None], dict[str, Tensor | None]]] = []
        """The buffers of each module, and what they were."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Each buffer with its copy."""
        self._grouped: list[tuple[list[Tensor], list[Tensor]]] = []
        """Copies and buffers of each device and type, which one kernel copies together."""
        self._single: list[tuple[Tensor, Tensor]] = []
        """The others."""

    def meet(self, roots: Iterable[nn.Module]) -> None:
        """Take the modules that there are now."""
        self._modules = list(dict.fromkeys(module for root in roots for module in inside(root)))
        self._signature = None

    def keep(self) -> None:
        """Copy them as they are before an update."""
        self.kept += 1
        each = [module._buffers for module in self._modules]
        present = [tensor for buffers in each for tensor in buffers.values() if tensor is not None]
        signature = [(id(tensor), tensor.shape) for tensor in present]
        if signature != self._signature:
            self._arrange(each, present)
            self._signature = signature
        with torch.no_grad():
            for copies, buffers in self._grouped:
                torch._foreach_copy_(copies, buffers)
            for copy, buffer in self._single:
                copy.copy_(buffer)

    def put_back(self, *, ago: int = 0) -> None:
        """Make them what they were before the update in hand."""
        assert ago == 0, "with buffers each update is judged before the next begins"
        replaced: dict[int, Tensor] = {}
        with torch.no_grad():
            for buffer, copy in self._copies:
                if not _is_equal(buffer, copy):
                    now = _written(buffer, copy)
                    if now is not buffer:
                        replaced[id(buffer)] = now
        for buffers, before in self._layout:
            for name in [name for name in buffers if name not in before]:
                del buffers[name]
            for name, tensor in before.items():
                wanted = tensor if tensor is None else replaced.get(id(tensor), tensor)
                if name not in buffers or buffers[name] is not wanted:
                    buffers[name] = wanted

    def mend(self) -> None:
        """Restore them where one is no longer finite: after an overflow they advance, but these would stay so."""
        if any(not torch.isfinite(now[torch.isfinite(copy)]).all() for now, copy in self._floating()):
            self.put_back()

    def _floating(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each buffer of floats as it is now, with its copy; one of another shape belongs to neither."""
        copies = {id(buffer): copy for buffer, copy in self._copies}
        for buffers, before in self._layout:
            for name, tensor in before.items():
                now = buffers.get(name)
                if tensor is not None and now is not None and now.shape == tensor.shape and now.is_floating_point():
                    yield now, copies[id(tensor)]

    def _arrange(self, each: list[Any], present: list[Tensor]) -> None:
        """Take over which buffers there are, with the storage of those that are like the ones before."""
        spare: dict[Any, list[Tensor]] = defaultdict(list)
        for _, copy in self._copies:
            spare[_kind_of(copy)].append(copy)
        self._layout = [(buffers, dict(buffers.items())) for buffers in each]
        self._copies, self._single = [], []
        kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for buffer in {id(tensor): tensor for tensor in present}.values():
            free = spare[_kind_of(buffer)]
            copy = free.pop() if free else buffer.detach().clone()
            self._copies.append((buffer, copy))
            if type(buffer) is Tensor and buffer.layout is torch.strided:
                kinds[buffer.device, buffer.dtype][0].append(copy)
                kinds[buffer.device, buffer.dtype][1].append(buffer)
            else:
                self._single.append((copy, buffer))
        self._grouped = list(kinds.values())


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors share where one can be copied into the other without anything being allocated."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; False where either holds a NaN."""
    plain = one.layout is torch.strided and not one.is_meta
    return plain and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _written(buffer: Tensor, copy: Tensor) -> Tensor:
    """Write a copy back into a buffer; returns another tensor with its values where torch does not allow that."""
    if _kind_of(buffer) != _kind_of(copy) or buffer.layout is not torch.strided or buffer.is_inference():
        return copy.clone()
    target, values = buffer, copy
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0:  # an expanded tensor, whose elements lie in one place
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return buffer
