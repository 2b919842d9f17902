"""Snapshots of all that a trial may change: the state of a trainer, and the switches of the process."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainwright.core.errors import SettingError
from trainwright.core.torch_private import buffer_dict, parameter_dict, versions_preserved
from trainwright.core.trees import parameters_in
from trainwright.data.data_state import adapted
from trainwright.precision.mixed_precision import matmul_precision, matmul_precisions, unwarned, with_precision
from trainwright.update.snapshot import RngStates, Snapshot, SnapshotPart, StateDicts
from trainwright.update.trainer_like import networks_of

if TYPE_CHECKING:
    from trainwright.trainer import Trainer


class TrainerSnapshot(Snapshot):
    """The state of a trainer: modules, optimizers, counters and random states, in host memory.

    Random states come first: an error in a later part does not leave them changed.
    """

    def __init__(self, trainer: Trainer[Any]) -> None:
        modules = [module for root in networks_of(trainer) for module in root.modules()]
        _refuse_lazy(modules)
        optimizers = list(trainer.optimizers.values())
        self._objects = ObjectGraph((trainer, *modules, *optimizers), tensors=parameters_in(*optimizers))
        super().__init__(RngStates(), self._objects, StateDicts({"counters": trainer._counters}))

    @property
    def tensors(self) -> list[Tensor]:
        """Every captured tensor: weights, buffers, gradients, optimizer states."""
        return self._objects.tensors


class ObjectGraph(SnapshotPart):
    """The containers, arrays, generators and tensors in the attributes of objects, at any depth.

    `restore` fills the same containers and tensors. Other objects in them are not copied.
    """

    def __init__(self, roots: Sequence[Any], *, tensors: Sequence[Tensor] = ()) -> None:
        self._roots, self._more = roots, tensors

    def capture(self) -> None:
        """Walk the objects, and copy their contents."""
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        self._generators: dict[int, tuple[Any, Any]] = {}
        tensors: dict[int, Tensor] = {}
        for root in self._roots:
            self._walk(vars(root), tensors)
            for name in _slots_of(type(root)):
                self._slots.append((root, name, getattr(root, name, _UNSET)))
                self._walk(self._slots[-1][-1], tensors)
        for tensor in self._more:
            tensors[id(tensor)] = tensor
        self._memory = TensorMemory(list(tensors.values()))
        self._memory.capture()

    def restore(self, ago: int = 0) -> None:
        """Fill all of them from the copies. Can be repeated."""
        for container, held in self._containers.values():
            _refill(container, held)
        for owner, name, value in self._slots:
            _set_slot(owner, name, value)
        for generator, state in self._generators.values():
            generator.set_state(state)
        self._memory.restore()

    @property
    def tensors(self) -> list[Tensor]:
        """Every captured tensor, gradients included."""
        return self._memory.tensors

    def _walk(self, value: Any, tensors: dict[int, Tensor]) -> None:
        """Record a container with its contents, and the tensors in it."""
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, LRScheduler):  # stepped by a hook; its optimizer is a separate root
            self._walk(vars(value), tensors)
        elif type(value) in _CONTAINERS and id(value) not in self._containers:
            self._containers[id(value)] = (value, copy.copy(value))
            for one in value.values() if isinstance(value, dict) else value:
                self._walk(one, tensors)
        elif type(value) is tuple:
            for one in value:
                self._walk(one, tensors)
        elif type(value) is np.ndarray and value.flags.writeable:
            self._containers[id(value)] = (value, value.copy())
        elif isinstance(value, _GENERATORS):
            generator = adapted(value)
            self._generators[id(value)] = (generator, generator.get_state())


class TensorMemory(SnapshotPart):
    """Tensors with their gradients and `requires_grad`, restored in the same memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._gradients = [(leaf, leaf.requires_grad, leaf.grad) for leaf in leaves]
        self.tensors = [*tensors, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        """The tensors, then their gradients."""

    def capture(self) -> None:
        """Copy the values to the host, and record their memory."""
        self._aliases = [tensor.detach() for tensor in self.tensors]
        self._values = [_unexpanded(tensor.detach()).to("cpu", copy=True) for tensor in self.tensors]
        self._hidden = versions_preserved(self.tensors)  # version counters show the weights as unchanged

    @torch.no_grad()
    def restore(self, ago: int = 0) -> None:
        """Restore values, memory, `requires_grad` and gradients."""
        with self._hidden:
            for tensor, alias, value in zip(self.tensors, self._aliases, self._values, strict=True):
                if _is_strided(tensor) and (tensor.data_ptr() != alias.data_ptr() or tensor.stride() != alias.stride()):
                    tensor.data = alias
                with torch.inference_mode() if tensor.is_inference() else nullcontext():
                    _unexpanded(tensor).copy_(value)
        for tensor, trained, gradient in self._gradients:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
            if tensor.grad is not gradient:
                tensor.grad = gradient


_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
"""Containers that are restored in place. Other objects are not copied."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_UNSET: Any = object()


def _is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor has one storage. Sparse and nested tensors have several."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view of an expanded tensor with each element once."""
    if not _is_strided(tensor):
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _refuse_lazy(modules: Sequence[nn.Module]) -> None:
    """Raise SettingError for lazy layers: their first batch initializes them irreversibly."""
    lazy = [type(module).__name__ for module in modules if _is_lazy(module)]
    if lazy:
        what = f"a trial of layers that have no shape yet: {', '.join(sorted(set(lazy)))}"
        fix = "run a batch through the model first: with torch.no_grad(): model(inputs)"
        raise SettingError(what, want="layers whose weights are made", fix=fix)


def _is_lazy(module: nn.Module) -> bool:
    own = (*parameter_dict(module).values(), *buffer_dict(module).values())
    return any(isinstance(one, nn.UninitializedParameter | nn.UninitializedBuffer) for one in own)


def _slots_of(kind: type) -> list[str]:
    """Return the names in `__slots__` of a class and its bases."""
    found: list[str] = []
    for one in kind.__mro__:
        own = vars(one).get("__slots__", ())
        found += (name for name in ([own] if isinstance(own, str) else own) if name not in ("__dict__", "__weakref__"))
    return [name for name in found if not name.startswith("__")]


def _set_slot(owner: Any, name: str, value: Any) -> None:
    if value is not _UNSET:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def _refill(container: Any, held: Any) -> None:
    """Fill a list, dict, set, deque or array with the contents of its copy."""
    if isinstance(container, np.ndarray):
        container[...] = held
        return
    if isinstance(container, list):
        container[:] = held
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(held)
    else:
        container.update(held)


# The switches of the process.

_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic")


@contextmanager
def switches_restored() -> Iterator[None]:
    """Context that restores the switches of the process.

    Restored are grad mode, threads, default dtype, float32 matmul precision, the switches of cuDNN, deterministic
    algorithms, the flushing of subnormal numbers, and the garbage collector.
    """
    grad, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    matmul, backends = matmul_precision(), matmul_precisions()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    tf32, operations = _tf32(), _operations()
    exact, flushes, collects = _exact(), flushes_denormal(), gc.isenabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        _restore_precision(matmul, tf32, [*backends, *operations])
        if _exact() != exact:  # only if changed: to set it, torch imports its compiler's settings for a second or more
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        if flushes_denormal() != flushes:
            torch.set_flush_denormal(flushes)
        (gc.enable if collects else gc.disable)()


def flushes_denormal() -> bool:
    """Return whether subnormal numbers are flushed to zero. torch has no getter for this switch."""
    return bool((torch.full((), 2.0**-149) + 0.0 == 0.0).item())


def _exact() -> tuple[bool, bool]:
    """Return (deterministic algorithms are on, other algorithms only warn)."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _restore_precision(matmul: str | None, tf32: bool | None, backends: list[tuple[Any, str]]) -> None:
    """Restore the float32 precision: the older switches first, since they also set the newer ones."""
    with unwarned():
        if matmul is not None and matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        if tf32 is not None and _tf32() != tf32:
            torch.backends.cudnn.allow_tf32 = tf32
    for backend, precision in backends:
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _tf32() -> bool | None:
    """Return whether cuDNN may round float32 to TF32; None if operations were set one by one."""
    try:
        with unwarned():
            return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def _operations() -> list[tuple[Any, str]]:
    """Return (operation, precision) of the cuDNN operations with a separate float32 precision."""
    return with_precision(*(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")))
