"""Functions on nested values and modules: copy, map, rebuild containers, list the tensors and parameters inside."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Return a path into a tree as Python code: `state['queue'][3]`."""
    first, *rest = keys or ("tree",)
    name = first if isinstance(first, str) and first.isidentifier() else f"tree[{first!r}]"
    return name + "".join(f"[{key!r}]" for key in rest)


def sequence_like(like: Any, items: Iterable[Any]) -> Any:
    """Return a tuple, named tuple or list of the class of `like` with these items."""
    kind: Any = type(like)
    return kind(*items) if hasattr(like, "_fields") else kind(items)


def mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `like` with these items; a dict if the class is read-only."""
    if type(like) is dict:
        return items
    try:
        made: Any = copy.copy(like)  # not by the constructor, whose arguments are unknown
        for key, value in items.items():
            made[key] = value
    except TypeError:  # a read-only mapping
        return items
    return made


def copy_tree(tree: Any, *at: Any, into: Any = None) -> Any:
    """Return a copy of dicts, lists and tuples with their tensors (detached); other objects are copied by `deepcopy`.

    `at`: the path to the tree, for errors. `into`: an earlier copy that is no longer needed; its storage is reused for
    tensors of the same shape, dtype, device and layout. SettingError for objects that cannot be copied, such as a lock.
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


def map_tree(
    each: Callable[..., Any], value: Any, *others: Any, is_leaf: Callable[..., bool] = lambda *_: False
) -> Any:
    """Return a nested value with `each` applied to its leaves.

    Mappings, lists, tuples and dataclasses keep their types. All other values are leaves, as are containers for which
    `is_leaf` returns True. `others`: nested values of the same structure; both functions then get the corresponding
    values of all of them.
    """
    if isinstance(value, Tensor) or is_leaf(value, *others):
        return each(value, *others)
    if isinstance(value, Mapping):
        columns = {key: (value[key], *(other[key] for other in others)) for key in value}
        return mapping_like(value, {key: map_tree(each, *column, is_leaf=is_leaf) for key, column in columns.items()})
    if isinstance(value, list | tuple):
        return sequence_like(
            value, [map_tree(each, *column, is_leaf=is_leaf) for column in zip(value, *others, strict=True)]
        )
    if _is_dataclass(value):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            column = [getattr(one, field.name) for one in (value, *others)]
            object.__setattr__(made, field.name, map_tree(each, *column, is_leaf=is_leaf))
        return made
    return each(value, *others)


def leaves_of(
    value: Any, at: str = "", *, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf, in the order of `map_tree`; paths are Python expressions that extend `at`."""
    if isinstance(value, Tensor) or is_leaf(value):
        yield at, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, f"{at}[{key!r}]", is_leaf=is_leaf)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{at}[{index}]", is_leaf=is_leaf)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name), f"{at}.{field.name}", is_leaf=is_leaf)
    else:
        yield at, value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and dataclasses, depth first."""
    return (leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def detached(value: Any) -> Any:
    """Return a nested value detached from autograd; the value itself if no tensor in it requires a gradient."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    return map_tree(_detached, value) if any(tensor.requires_grad for tensor in tensors_in(value)) else value


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def inside(root: nn.Module) -> list[nn.Module]:
    """Return the list of `root.modules()`, in a quarter of the time."""
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
    """Return the list of `root.parameters()`."""
    every = (p for module in inside(root) for p in parameter_dict(module).values() if p is not None)
    return list({id(p): p for p in every}.values())


def parameters_in(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of optimizers in order; shared parameters are repeated."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def shapes_of(output: Tensor, target: Tensor) -> str:
    """Return shapes and dtypes of an output and a target as text, for an error."""
    return f"output {tuple(output.shape)} {output.dtype}, target {tuple(target.shape)} {target.dtype}"


class NamedParts:
    """Combines several named parts of a checkpoint into one."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> Tree:
        """Return the state of each part, by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the state of each part; return the texts that parts return, with their names, as one line or None.

        ValueError if the names differ.
        """
        if set(tree) != set(self.parts):
            raise ValueError(f"the checkpoint has {sorted(tree)}, this Trainer {sorted(self.parts)}")
        news = [(name, part.load_state_dict(tree[name])) for name, part in self.parts.items()]
        return "; ".join(f"{name}: {sentence}" for name, sentence in news if isinstance(sentence, str)) or None
