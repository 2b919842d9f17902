"""Nested values and module trees: copy them, rebuild their containers, list the tensors and parameters inside."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.errors import SettingError
from trainwright.core.torch_private import child_dict, parameter_dict
from trainwright.protocols import Tree

Keys = tuple[Any, ...]
"""The path from the root of a tree to one of its values."""


def path_text(keys: Keys) -> str:
    """Return a path into a tree as it is written in Python: `state['queue'][3]`."""
    first, *rest = keys or ("tree",)
    name = first if isinstance(first, str) and first.isidentifier() else f"tree[{first!r}]"
    return name + "".join(f"[{key!r}]" for key in rest)


def sequence_like(like: Any, items: Iterable[Any]) -> Any:
    """Return a tuple, named tuple or list of the same class, with these items."""
    kind: Any = type(like)
    return kind(*items) if hasattr(like, "_fields") else kind(items)


def mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, with these items; a dict if the class cannot be written to."""
    if type(like) is dict:
        return items
    try:
        made: Any = copy.copy(like)  # the class may have another constructor
        for key, value in items.items():
            made[key] = value
    except TypeError:  # a read-only mapping
        return items
    return made


def copy_tree(tree: Any, *at: Any, into: Any = None) -> Any:
    """Copy dicts, lists and tuples with their tensors (detached); other objects by `deepcopy`.

    `at`: the path to the tree, for errors. `into`: an earlier copy that is no longer needed, whose storage is reused
    for tensors of the same form. SettingError for objects that cannot be copied, such as a lock.
    """
    if isinstance(tree, Tensor):
        return into.copy_(tree.detach()) if _is_alike(tree, into) else tree.detach().clone()
    spare: Any
    if type(tree) is dict:
        spare = into if type(into) is dict else {}
        return {key: copy_tree(value, *at, key, into=spare.get(key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        alike = type(into) in (list, tuple) and len(into) == len(tree)
        return type(tree)(
            copy_tree(value, *at, index, into=into[index] if alike else None) for index, value in enumerate(tree)
        )
    return _copy_object(tree, at)


def _copy_object(tree: Any, at: Keys) -> Any:
    try:
        return deepcopy(tree)
    except TypeError as error:
        kind, where = type(tree).__name__, "".join(f"[{key!r}]" for key in at)
        what = f"self.state{where} is a {kind}, which cannot be copied; an evaluation works on a copy"
        fix = f"keep it in an attribute of the Trainer: self.my_{kind.lower()} = ..."
        raise SettingError(what, want="plain data and tensors", fix=fix) from error


def _is_alike(tensor: Tensor, other: Any) -> bool:
    """Return whether `tensor` can be copied into `other` without an allocation."""
    if not (type(tensor) is type(other) is Tensor) or other.is_inference():
        return False
    form = (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
    return form == (other.shape, other.dtype, other.device, other.layout)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested value, depth first: of mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        items = value if isinstance(value, list | tuple) else ()
    for item in items:
        yield from tensors_in(item)


def detached(value: Any) -> Any:
    """Return a nested value without its autograd graph; the value itself where no tensor in it requires a gradient."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    return _detached(value) if any(tensor.requires_grad for tensor in tensors_in(value)) else value


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return mapping_like(value, {key: _detached(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return sequence_like(value, map(_detached, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _detached(getattr(value, field.name)))
        return made
    return value


def inside(root: nn.Module) -> list[nn.Module]:
    """Return the modules of `root.modules()`, in the same order, in a quarter of the time."""
    found: dict[nn.Module, None] = {}
    left = [root]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            children = child_dict(module)
            if children:  # most modules have none
                left += [child for child in reversed(children.values()) if child is not None]
    return list(found)


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `root.parameters()`, in its order."""
    every = (p for module in inside(root) for p in parameter_dict(module).values() if p is not None)
    return list({id(p): p for p in every}.values())


def parameters_in(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of optimizers, in order; a shared one is repeated."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def shapes_of(output: Tensor, target: Tensor) -> str:
    """Return shapes and dtypes of an output and a target as text, for an error."""
    return f"output {tuple(output.shape)} {output.dtype}, target {tuple(target.shape)} {target.dtype}"


class NamedParts:
    """Several parts of a checkpoint as one, by name."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> Tree:
        """Return the state of each part by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the state of each part; return their sentences by name. ValueError where the names are others."""
        if set(tree) != set(self.parts):
            raise ValueError(f"the checkpoint has {sorted(tree)}, this Trainer {sorted(self.parts)}")
        news = [(name, part.load_state_dict(tree[name])) for name, part in self.parts.items()]
        return "; ".join(f"{name}: {sentence}" for name, sentence in news if isinstance(sentence, str)) or None
