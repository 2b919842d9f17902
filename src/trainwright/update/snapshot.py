"""`Snapshot`: copies state that an update, a pass or a trial may change, and restores it, part by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from trainwright.core import host_reads
from trainwright.core.rng import have_moved, random_state, set_random_state
from trainwright.core.torch_private import buffer_dict
from trainwright.core.trees import copy_tree, inside
from trainwright.protocols import Stateful, Tree

if TYPE_CHECKING:
    from trainwright.update.loss_tracker import LossTracker
    from trainwright.update.running_means import Terms
    from trainwright.update.trainer_like import TrainerLike


class SnapshotPart:
    """One part of a snapshot. `capture` reuses the storage of earlier captures."""

    slots = 1
    """The number of captures that are stored."""

    def refresh(self) -> None:
        """Collect the objects to copy again. No-op here."""

    def capture(self) -> None:
        """Copy the current values."""
        raise NotImplementedError

    def restore(self, ago: int = 0) -> None:
        """Restore the values of the last capture, or of the capture `ago` before it."""
        raise NotImplementedError

    def restore_nonfinite(self) -> None:
        """Restore the last capture if a value has become NaN or infinite since. No-op here."""


class Snapshot:
    """Captures and restores its parts in order. As a context manager, it restores at the end of the block.

    Uses: an update that is not applied restores buffers and `state`; a window that is split after an out-of-memory
    error also restores totals and random states; the rollback of an interrupted window restores the user's parts; a
    trial restores all state of a trainer. Only the given parts are copied.
    """

    def __init__(self, *parts: SnapshotPart) -> None:
        self.parts = parts
        self.captured = 0
        """The number of captures so far."""

    def refresh(self) -> None:
        """Make each part collect its objects again, since layers may be added between two epochs."""
        for part in self.parts:
            part.refresh()

    def capture(self) -> None:
        """Copy the current values of all parts."""
        self.captured += 1
        for part in self.parts:
            part.capture()

    def restore(self, *, ago: int = 0) -> None:
        """Restore all parts to the last capture, or to the capture `ago` before it."""
        assert all(ago < part.slots for part in self.parts), "this capture is overwritten"
        for part in self.parts:
            part.restore(ago)

    def restore_nonfinite(self) -> None:
        """Restore each part with a value that has become NaN or infinite since the last capture.

        A skipped overflow keeps the new BatchNorm statistics, as torch's GradScaler does. Non-finite statistics,
        however, never recover; a step of SAM along an overflowed gradient produces them.
        """
        for part in self.parts:
            part.restore_nonfinite()

    def __enter__(self) -> Self:
        self.capture()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()


class Tensors(SnapshotPart):
    """A fixed list of tensors, such as BatchNorm statistics; one kernel copies all of one device and dtype.

    `slots`: the number of captures that are stored. The deferred check restores a capture of several updates ago.
    """

    def __init__(self, tensors: Iterable[Tensor], *, slots: int = 1) -> None:
        self.slots, self._tensors = slots, list(tensors)
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in self._tensors:
            kinds[tensor.device, tensor.dtype].append(tensor)
        self._groups = list(kinds.values())
        self._copies = [[[one.detach().clone() for one in group] for group in self._groups] for _ in range(slots)]
        self._last = 0
        """The slot of the last capture."""

    def capture(self) -> None:
        """Copy the values into the next slot."""
        self._last = (self._last + 1) % self.slots
        for copies, tensors in zip(self._copies[self._last], self._groups, strict=True):
            torch._foreach_copy_(copies, tensors)

    def restore(self, ago: int = 0) -> None:
        """Restore all values."""
        for copies, tensors in zip(self._copies[(self._last - ago) % self.slots], self._groups, strict=True):
            torch._foreach_copy_(tensors, copies)

    def restore_nonfinite(self) -> None:
        """Restore all values if any is not finite."""
        if not all(host_reads.read([torch.isfinite(tensor).all() for tensor in self._tensors])):
            self.restore()


class Buffers(SnapshotPart):
    """All buffers of modules and their submodules.

    A forward may write to a buffer, also through `.data` without a version change; it may replace, register or remove
    one. So all buffers are copied, into storage that is allocated once.
    """

    def __init__(self, roots: Callable[[], Iterable[nn.Module]]) -> None:
        """Initialize. `roots`: returns the outermost modules; called by `refresh`."""
        self._roots = roots
        self._modules: list[nn.Module] = []
        self._signature: list[tuple[int, torch.Size]] = []
        """Identity and shape of each buffer when the storage was allocated."""
        self._layout: list[tuple[MutableMapping[str, Tensor | None], dict[str, Tensor | None]]] = []
        """The dict of buffers of each module, and its contents at the last capture."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Pairs of a buffer and its copy."""
        self._grouped: list[tuple[list[Tensor], list[Tensor]]] = []
        """Copies and buffers by device and dtype, for one kernel each."""
        self._single: list[tuple[Tensor, Tensor]] = []
        """Pairs of copies and buffers that such a kernel does not support."""
        self.refresh()

    def refresh(self) -> None:
        """Collect the modules inside the roots."""
        self._modules = list(dict.fromkeys(module for root in self._roots() for module in inside(root)))

    def capture(self) -> None:
        """Copy every buffer, and record the tensor object that it is."""
        self._layout = [(buffers, dict(buffers.items())) for buffers in map(buffer_dict, self._modules)]
        present = [tensor for _, before in self._layout for tensor in before.values() if tensor is not None]
        signature = [(id(tensor), tensor.shape) for tensor in present]
        if signature != self._signature:
            self._arrange(present)
            self._signature = signature
        with torch.no_grad():
            for copies, buffers in self._grouped:
                torch._foreach_copy_(copies, buffers)
            for copy, buffer in self._single:
                copy.copy_(buffer)

    def restore(self, ago: int = 0) -> None:
        """Restore the values of changed buffers, and assign the earlier tensor objects."""
        replaced = self._write_changed() if self._copies else {}
        for buffers, before in self._layout:
            present = dict(buffers.items())  # the buffers of a ScriptModule are no dict
            for name in present.keys() - before.keys():
                del buffers[name]
            for name, tensor in before.items():
                wanted = tensor if tensor is None else replaced.get(id(tensor), tensor)
                if name not in present or present[name] is not wanted:
                    buffers[name] = wanted

    def _write_changed(self) -> dict[int, Tensor]:
        """Restore the values of changed buffers; return new tensors for those that torch cannot write to, by id."""
        replaced: dict[int, Tensor] = {}
        with torch.no_grad():
            for buffer, copy in self._copies:
                if not _is_equal(buffer, copy):
                    restored = _write_back(buffer, copy)
                    if restored is not buffer:
                        replaced[id(buffer)] = restored
        return replaced

    def restore_nonfinite(self) -> None:
        """Restore all buffers if an element that was finite is no longer finite."""
        if any(not torch.isfinite(now[torch.isfinite(copy)]).all() for now, copy in self._floating()):
            self.restore()

    def _floating(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each current floating-point buffer with its copy, unless its shape has changed."""
        copies = {id(buffer): copy for buffer, copy in self._copies}
        for buffers, before in self._layout:
            present = dict(buffers.items())
            for name, tensor in before.items():
                now = present.get(name)
                if tensor is not None and now is not None and now.shape == tensor.shape and now.is_floating_point():
                    yield now, copies[id(tensor)]

    def _arrange(self, present: list[Tensor]) -> None:
        """Allocate copies for the current buffers, and reuse storage of the same kind."""
        spare: dict[Any, list[Tensor]] = defaultdict(list)
        for _, copy in self._copies:
            spare[_kind_of(copy)].append(copy)
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


class UserState(SnapshotPart):
    """The user's `state` of a trainer."""

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer = trainer
        self._copy: dict[str, Any] = {}

    def capture(self) -> None:
        """Copy the state; tensors into the storage of the last copy."""
        self._copy = copy_tree(self._trainer.state, into=self._copy)

    def restore(self, ago: int = 0) -> None:
        """Restore the contents of the same dict object."""
        self._trainer.state.clear()
        self._trainer.state.update(copy_tree(self._copy))


class LossTotals(SnapshotPart):
    """The running sums of an epoch's losses and metrics, and the numbers of the current update."""

    def __init__(self, tracker: LossTracker) -> None:
        self._tracker = tracker
        self._sums: dict[str, Any] = {}
        self._terms: Terms = {}

    def capture(self) -> None:
        """Copy sums and numbers; reads recorded numbers from the device."""
        self._sums, self._terms = copy_tree(self._tracker.state_dict()), _copied(self._tracker.terms)

    def restore(self, ago: int = 0) -> None:
        """Restore sums and numbers; drop those recorded since."""
        self._tracker.restore_sums(copy_tree(self._sums))
        self._tracker.terms = _copied(self._terms)


class RngStates(SnapshotPart):
    """The global random states: Python, NumPy, torch, and each accelerator in use."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def capture(self) -> None:
        """Copy the states."""
        self._states = random_state()

    def restore(self, ago: int = 0) -> None:
        """Restore the states."""
        set_random_state(self._states)

    @property
    def changed(self) -> bool:
        """Whether random numbers were drawn since the capture."""
        return have_moved(self._states)


class StateDicts(SnapshotPart):
    """Objects with `state_dict` and `load_state_dict`, by name."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._objects = objects
        self.trees: dict[str, Tree] = {}
        """The captured states, by name."""

    def capture(self) -> None:
        """Copy the state of each object."""
        self.trees = {name: copy_tree(one.state_dict()) for name, one in self._objects.items()}

    def restore(self, ago: int = 0) -> None:
        """Load the captured state of each object."""
        for name, one in self._objects.items():
            one.load_state_dict(copy_tree(self.trees[name]))


def _copied(terms: Terms) -> Terms:
    return {name: list(each) for name, each in terms.items()}


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key; tensors with equal keys can share storage for copies."""
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; False if either contains NaN."""
    plain = one.layout is torch.strided and not one.is_meta
    return plain and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _write_back(buffer: Tensor, copy: Tensor) -> Tensor:
    """Copy saved values into a buffer and return it; return a new tensor if torch cannot write to the buffer."""
    if _kind_of(buffer) != _kind_of(copy) or buffer.layout is not torch.strided or buffer.is_inference():
        return copy.clone()
    target, values = buffer, copy
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0:  # an expanded dimension: its elements share memory
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return buffer
