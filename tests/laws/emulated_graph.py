"""A CUDA graph on the CPU: ops are recorded without being carried out, and carried out again on the same memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
FREED = "memory that the graph reads or writes was freed after its recording"
NO_SEED = "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture"
NO_GENERATOR = "Attempt to increase offset for a CUDA generator not in capture mode."

Op = Any  # torch._ops.OpOverload, whose members have no types


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Have the library record graphs on the CPU; `EmulatedGraph.made` starts empty."""
    from trainwright.runtime import graphs

    patch.setattr(EmulatedGraph, "made", [])
    patch.setitem(graphs.RECORDERS, "cpu", EmulatedGraph)


def graph_of(work: Callable[[], Any]) -> tuple[EmulatedGraph, Any]:
    """Return a graph of this work on the CPU, and what the work returned."""
    graph = EmulatedGraph(torch.device("cpu"))
    with graph.recording():
        result = work()
    return graph, result


class EmulatedGraph:
    """One graph: recorded once, replayed as often as one likes.

    As with a CUDA graph, numbers are baked in and tensors are read anew; what a recording writes is not written;
    memory made inside belongs to the graph, and holds nothing (NaN) until the first replay; a read by the host breaks
    the recording, in the recording thread alone; so does a generator that is not torch's own, and a look at the state
    of torch's own. All graphs share one pool: memory of one that nobody holds any more at the end of a later recording
    is lost at the later one's replays. A replay raises where memory from outside was freed: torch raises too if asked
    to, and reads whatever lies there otherwise. Unlike there, each result of one graph has memory of its own, and a
    0-dim tensor of the host is read anew as well: nothing tells it from one of the device.
    """

    made: ClassVar[list[EmulatedGraph]] = []
    """All graphs since `emulate`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.replays = 0
        self.baked: list[Tensor] = []
        """The values of tensors made from data of the host: each replay has them again."""
        self._state: str = "new"  # then "recording"; "broken", "failed" or "ready"
        self._launches: list[_Launch] = []
        self._memory = _Memory()
        self._needed: list[int] = []
        """Memory from outside that must stay alive."""
        self._taken: list[Tensor] = []
        """Memory of other graphs that this one writes its own to."""
        EmulatedGraph.made.append(self)

    @property
    def recorded(self) -> int:
        """How many ops were recorded; views and empty memory are none."""
        return len(self._launches)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the ops of this thread; an error inside leaves, and the graph stays unusable."""
        if self._state != "new":
            raise RuntimeError(f"a graph is recorded once; this one is {self._state}")
        if _is_recording():
            raise RuntimeError(NOT_PERMITTED)
        random = torch.get_rng_state()
        self._state, _here.graph = "recording", self
        try:
            with _host_refused(self._break), _Tape(self._enqueue):
                yield
            if self._state == "broken":  # someone caught the error inside
                raise RuntimeError(INVALIDATED)
            self._state = "ready"
        finally:
            _here.graph = None
            torch.set_rng_state(random)
            with _disable_current_modes(), torch.no_grad():
                self._memory.put_back()
            if self._state != "ready":
                self._state = "failed"
                self._launches.clear()
                self._memory.end()
        self._hold()

    def replay(self) -> None:
        """Carry the recorded ops out, on the memory they were recorded on."""
        if _is_recording():
            raise RuntimeError(NOT_PERMITTED)
        if self._state != "ready":
            raise RuntimeError(f"a graph is replayed after its recording; this one is {self._state}")
        if not all(_holders(key) for key in self._needed):
            raise RuntimeError(FREED)
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch.inference_mode())  # outside it, memory made in it cannot be written
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            for launch in self._launches:
                launch.carry_out()
            for tensor in self._taken:
                tensor.fill_(_poison(tensor.dtype))
        self.replays += 1

    def _hold(self) -> None:
        """Keep the memory made inside for good, and note what is needed from outside."""
        made, before = self._memory.end()
        own = [*made, *_tensors([(launch.args, launch.kwargs, launch.targets) for launch in self._launches])]
        keys = [_key(tensor) for tensor in own]
        held = set(keys)
        _held.update(keys)
        self._taken = _nobodys()
        _pool.update({_key(tensor): tensor for tensor in made})
        weakref.finalize(self, _release, keys)
        # what only the recording has held was made inside by torch, by none of the ops that a mode is shown
        self._needed = [key for key in before if key in held and key not in _pool and _holders(key)]

    def _enqueue(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op, computed only to learn the shape of its results."""
        if self._state == "broken":
            raise RuntimeError(INVALIDATED)
        given = _tensors((args, kwargs))
        self._refuse(op, given, args, kwargs)
        if given and all(tensor.device.type != self.device.type for tensor in given):
            return op(*args, **kwargs)  # the host's own work is done at once
        if op._schema.name == "aten::lift_fresh":
            return self._bake(*given)
        self._memory.keep(given)
        result = op(*args, **kwargs)
        results = _tensors(result)
        is_here = all(tensor.device.type == self.device.type for tensor in results)
        if not is_here and not given:
            return result  # made on the host
        if not is_here or _is_sparse(results):
            self._break()
        known = {_key(tensor) for tensor in given}
        targets = [None if _key(tensor) in known else tensor.data for tensor in results]
        self._memory.own([target for target in targets if target is not None])
        if _is_launched(op, given, targets):
            # after the op: an `out=` has its size now. `data`: another tensor on the same memory, without history
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.data, (args, kwargs))
            self._launches.append(_Launch(op, args, kwargs, targets))
        return result

    def _refuse(self, op: Op, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise for an op for which the host would wait, or that no graph can hold."""
        own: Any = torch.default_generator
        generators: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        if any(generator._cdata != own._cdata for generator in generators):
            self._break(NO_GENERATOR)
        is_split = len({tensor.device.type for tensor in given}) > 1
        if is_split or _is_sparse(given) or _is_host_read(op, args, kwargs):
            self._break()

    def _bake(self, host: Tensor) -> Tensor:
        """Take values of the host into the graph, into memory of their own."""
        value, target = host.clone(), host.clone()
        self.baked.append(value)
        self._memory.own([target])
        self._launches.append(_Launch(torch.ops.aten.copy_.default, (target.data, value), {}, [None]))
        return target

    def _break(self, text: str = NOT_PERMITTED) -> NoReturn:
        self._state = "broken"
        raise RuntimeError(text)


_here = threading.local()


def _is_recording() -> bool:
    """Whether this thread records a graph."""
    return getattr(_here, "graph", None) is not None


_held = Counter[int]()
"""How often graphs hold each memory."""
_pool: dict[int, Tensor] = {}
"""The memory made inside recordings, whole."""


def _holders(key: int) -> int:
    """How many hold a memory, besides graphs."""
    return _count(key) - _held[key] - _named()


@cache
def _named() -> int:
    """How many references torch keeps of itself, once Python has seen a memory: 1, or 0 in older ones."""
    alone = torch.empty(1)
    return _count(_key(alone)) - 1


def _count(key: int) -> int:
    return int(torch._C._storage_Use_Count(key))


def _nobodys() -> list[Tensor]:
    """Return the memory of graphs that is free to be taken by a new one."""
    return [tensor for key, tensor in _pool.items() if not _holders(key)]


def _release(keys: list[int]) -> None:
    """Let go of the memory of a graph that has ended."""
    _held.subtract(keys)
    for key in keys:
        if not _held[key]:
            del _held[key]
            _pool.pop(key, None)


class _Tape(TorchDispatchMode):
    """Hands every op of this thread to `enqueue`, backward included."""

    def __init__(self, enqueue: Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._enqueue = enqueue

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._enqueue(func, args, kwargs or {})


@dataclass(frozen=True)
class _Launch:
    """One recorded op: its arguments, and where its new results go (None: they lie in an argument)."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: list[Tensor | None]

    def carry_out(self) -> None:
        results = _tensors(self.op(*self.args, **self.kwargs))
        for target, result in zip(self.targets, results, strict=True):
            if target is not None:
                target.copy_(result)


@dataclass
class _Memory:
    """The memory that a recording meets: what was there before, with its old bytes, and what was made inside."""

    before: dict[int, tuple[UntypedStorage, UntypedStorage]] = field(default_factory=dict)
    made: dict[int, tuple[UntypedStorage, torch.dtype]] = field(default_factory=dict)

    def keep(self, given: list[Tensor]) -> None:
        """Keep the bytes of what an op is about to touch. All of it: native_batch_norm does not say what it writes."""
        for tensor in given:
            key = _key(tensor)
            if key not in self.made and key not in self.before:
                storage = tensor.untyped_storage()
                self.before[key] = (storage, storage.clone())

    def own(self, results: list[Tensor]) -> None:
        """Note memory made inside."""
        for tensor in results:
            self.made.setdefault(_key(tensor), (tensor.untyped_storage(), tensor.dtype))

    def put_back(self) -> None:
        """Have everything as if nothing had been carried out; what was made inside holds poison."""
        for storage, old in self.before.values():
            now, then = _over(storage, torch.uint8), _over(old, torch.uint8)
            if not torch.equal(now[: then.numel()], then):  # what is only read may lie in memory that is read-only
                now[: then.numel()].copy_(then)
        for storage, dtype in self.made.values():
            _over(storage, dtype).fill_(_poison(dtype))

    def end(self) -> tuple[list[Tensor], list[int]]:
        """Forget all of it; return what was made inside, and what was there before."""
        made = [_over(storage, dtype) for storage, dtype in self.made.values()]
        before = list(self.before)
        self.before, self.made = {}, {}
        return made, before


@contextmanager
def _host_refused(refuse: Callable[..., NoReturn]) -> Iterator[None]:
    """Raise at reads by the host that are no ops on the CPU, in this thread alone."""
    thread = threading.get_ident()

    def refused(original: Callable[..., Any], *text: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                refuse(*text)
            return original(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__", "__dlpack__", "__repr__"):
            patch.setattr(Tensor, name, refused(getattr(Tensor, name)))
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed"):
            function = refused(getattr(torch.random, name), NO_SEED)
            patch.setattr(torch, name, function)
            patch.setattr(torch.random, name, function)
        yield


_EMPTY = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "empty_permuted")} | {
    "aten::new_empty",
    "aten::new_empty_strided",
}


def _is_launched(op: Op, given: list[Tensor], targets: list[Tensor | None]) -> bool:
    """Whether an op does more than name memory."""
    if op._schema.name in _EMPTY or torch.Tag.inplace_view in op.tags:
        return False
    has_made = any(target is not None for target in targets)
    return has_made or (bool(given) and (op._schema.is_mutable or not targets))


def _is_host_read(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for a value in an op on a CUDA device."""
    name = op._schema.name
    if name == "aten::index":
        return _has_mask(args[1])
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return _has_mask(args[1]) and args[2].numel() != 1  # a number at a mask is a masked_fill
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return name == "aten::_linalg_check_errors" or not tags.isdisjoint(op.tags)


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_sparse(tensors: list[Tensor]) -> bool:
    return any(tensor.layout != torch.strided for tensor in tensors)


def _key(tensor: Tensor) -> int:
    """What memory a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def _over(storage: UntypedStorage, dtype: torch.dtype) -> Tensor:
    """A whole storage as one tensor."""
    return torch.empty(0, dtype=dtype).set_(storage)


def _poison(dtype: torch.dtype) -> float | int | bool:
    """What no one can take for a result: an index out of range among integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max - 42
