"""Two devices on a machine without one: tensors that compute on the CPU and say that they lie elsewhere.

A tensor that is `moved` to "cpu:1" or "cpu:2" holds its values in a plain tensor, computes with it, and refuses what
two accelerators refuse: an operation over tensors of two devices. As there, a CPU scalar goes with any device, copies
go anywhere, and the lists of `_foreach_` kernels are looked at pair by pair. Autograd, optimizers, torch's grouping
by devices, checkpoints: all is torch's and the library's own. What is not here: streams, asynchronous copies,
peer-to-peer transfers, random states of devices, and whatever asks for `device.type == "cuda"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FIRST, SECOND = torch.device("cpu", 1), torch.device("cpu", 2)
HOST = torch.device("cpu")
_MAKES_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")


class Lying(Tensor):
    """A tensor that says it lies on another device than the one its values are on."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> Lying:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device,
        )

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"{self.values!r} on {self.device}"

    def data_ptr(self) -> int:
        """Where the values lie: what tells tied tensors."""
        return self.values.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """The values: who sees `device.type == "cpu"` may ask."""
        return self.values.numpy(force=force)

    def tolist(self) -> Any:
        """The values, as `numpy` gives them."""
        return self.values.tolist()

    def untyped_storage(self) -> Any:
        """The memory of the values: what a checkpoint is written from."""
        return self.values.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Inside, "cpu:1" and "cpu:2" are devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    device = kwargs.get("device")
    if device is None:
        device = _common(name, args, leaves)
    elif device.type == "cpu":
        kwargs = {**kwargs, "device": HOST}
    known = {id(leaf.values): leaf for leaf in leaves if isinstance(leaf, Lying)}
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    returned = func(*plain_args, **plain_kwargs)
    if name.startswith("aten::_foreach") and isinstance(returned, list | tuple):
        homes = [_home(leaf) for leaf in args[0]]
        return [_wrapped(one, home, known) for one, home in zip(returned, homes, strict=True)]
    return tree_map(lambda one: _wrapped(one, device, known), returned)


def _plain(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Lying) else leaf


def _home(leaf: Tensor) -> torch.device:
    return leaf.device if isinstance(leaf, Lying) else HOST


def _wrapped(made: Any, device: torch.device, known: dict[int, Lying]) -> Any:
    if not isinstance(made, Tensor):
        return made
    if id(made) in known:  # what was changed in place stays the same tensor
        return known[id(made)]
    return Lying(made, device) if device in (FIRST, SECOND) else made


def _common(name: str, args: Any, leaves: list[Tensor]) -> torch.device:
    """The device on which an operation computes; RuntimeError, in torch's words, where there are two."""
    if name in _MAKES_COPIES:
        return _home(leaves[0]) if leaves else HOST
    first = HOST
    for group in _groups(name, args, leaves):
        homes = list(dict.fromkeys(_home(leaf) for leaf in group if leaf.dim() or _home(leaf) != HOST))
        if len(homes) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{homes[0]} and {homes[1]}! ({name})"
            )
        first = homes[0] if homes else first
    return first


def _groups(name: str, args: Any, leaves: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors that one computation takes together: of lists of `_foreach_` kernels those of one place."""
    if not name.startswith("aten::_foreach"):
        yield leaves
        return
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
    lone = [one for one in args if isinstance(one, Tensor)]
    for together in zip(*lists, strict=True):
        yield [*together, *lone]


def put(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The module, with parameters and buffers that say they lie on `device`; what `module.to(device)` does there."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(Lying(parameter.detach(), device), parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = Lying(buffer, device)
    return module


def written_plain(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have states given as plain tensors, as copies from an accelerator are: a checkpoint takes no other class."""

    def plain(owner: Any, state: Any, *_: Any) -> Any:
        return tree_map(_plain, state)

    def plain_in_place(owner: Any, state: Any, *_: Any) -> None:
        state.update({name: _plain(value) for name, value in state.items()})

    module.register_state_dict_post_hook(plain_in_place)
    optimizer.register_state_dict_post_hook(plain)
