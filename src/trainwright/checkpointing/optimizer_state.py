"""Matches optimizer state by parameter name, so that a resumed run may pass the parameters in another order.

torch stores the state by position. A checkpoint also stores name and shape of each parameter, and a resume moves the
state to the parameter of the same name in the same group. State that belongs to no single parameter, such as that of
LBFGS, needs the saved order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainwright.checkpointing.load import DamagedError
from trainwright.core.checks import FormError, check_form, is_number
from trainwright.core.errors import CheckpointError, first_line, listed
from trainwright.core.trees import NamedParts
from trainwright.distributed.pieces import LazyTensor
from trainwright.protocols import Stateful, Tree

PARAMETERS = "optimizer_parameters"
"""The part of a checkpoint with names and shapes of the parameters of each optimizer, by group."""
_OTHER_SHAPES = ("LBFGS", "Adafactor")
"""torch optimizers whose state tensors may differ in shape from their parameters."""


def optimizer_states(
    parts: Mapping[str, Stateful], tree: dict[str, Tree]
) -> Iterator[tuple[str, Optimizer, dict[str, Tree], str]]:
    """Yield (path, optimizer, dict, key) of each optimizer among the parts: its state is `dict[key]`."""
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            yield name, part, tree, name
        elif isinstance(part, NamedParts) and isinstance(tree[name], dict):
            for key, member in part.parts.items():
                if isinstance(member, Optimizer) and key in tree[name]:
                    yield f"{name}.{key}", member, tree[name], key


def parameters_of_optimizers(parts: Mapping[str, Stateful], tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return (name, shape) of each parameter of each optimizer, by group; name None without a module."""
    names = parameter_names(parts)
    return {path: _names_and_shapes(optimizer, names) for path, optimizer, *_ in optimizer_states(parts, tree)}


def put_in_current_order(parts: Mapping[str, Stateful], tree: dict[str, Tree], saved: Any, *, origin: str) -> list[str]:
    """Reorder the state of each optimizer to the current order of its parameters; return header lines.

    `saved`: the saved result of `parameters_of_optimizers`. Parameters are matched by name within a group; parameters
    without a name by position. CheckpointError if names or shapes differ, or if the order differs and a state belongs
    to no single parameter.
    """
    lines: list[str] = []
    names = parameter_names(parts)
    for path, optimizer, states, key in optimizer_states(parts, tree):
        now = _names_and_shapes(optimizer, names)
        try:
            before = saved[path]
            if type(optimizer).__module__.startswith(("torch.optim.", "trainwright.")):  # others check their own state
                _check_state(optimizer, states[key], before)
            if before != now or any(name is None for group in now for name, _ in group):
                match = _Match(path, optimizer, states[key], parts=parts, origin=origin)
                states[key] = match.ordered(before, lines)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # a form that no run writes
            why = error if isinstance(error, FormError) else first_line(error)
            raise DamagedError(f"{origin} is damaged: in part {path!r} {why}", origin) from error
    return lines


def named_parameters(parts: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Return name -> parameter for the modules among the parts, with all names: model, loss, then others."""
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    roots = sorted(modules, key=lambda name: (name != "model", name != "loss"))
    named = ((root, modules[root].named_parameters(remove_duplicate=False)) for root in roots)
    return {f"{root}.{name}": parameter for root, each in named for name, parameter in each}


def parameter_names(parts: Mapping[str, Stateful]) -> dict[int, str]:
    """Return id -> first name for the parameters of the modules among the parts."""
    return {id(parameter): name for name, parameter in reversed(named_parameters(parts).items())}


def _names_and_shapes(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[Any]]:
    return [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]


class _Match:
    """Reorders the saved state of one optimizer."""

    def __init__(
        self, path: str, optimizer: Optimizer, state: Any, *, parts: Mapping[str, Stateful], origin: str
    ) -> None:
        self.path, self.optimizer, self.state, self.origin = path, optimizer, state, origin
        self.known, self.names = named_parameters(parts), parameter_names(parts)

    def ordered(self, saved: Any, lines: list[str]) -> Any:
        """Return the state in the current order; append header lines to `lines`."""
        if nameless := sum(name is None for group in saved for name, _ in group):
            what = "parameter of part" if nameless == 1 else "parameters of part"
            lines.append(f"resumed: {nameless} {what} {self.path!r} without a name: matched by position and shape")
        orders = self._orders(saved)
        if all(order == sorted(order) for order in orders):
            return self.state
        self._check_movable(saved)
        return _moved(self.state, orders)

    def _orders(self, saved: list[list[Any]]) -> list[list[int]]:
        """Return the saved position of each parameter, by group. Refuses other parameters and shapes."""
        groups = [list(group["params"]) for group in self.optimizer.param_groups]
        orders: list[list[int]] = []
        wrong: list[str] = []
        if len(saved) != len(groups):
            wrong.append(f"{len(saved)} parameter groups in the checkpoint, {len(groups)} now")
        for index, (old, now) in enumerate(zip(saved, groups, strict=False)):
            left = {id(parameter): parameter for parameter in now}
            nameless = [parameter for parameter in now if id(parameter) not in self.names]
            found: dict[int, int] = {}
            missing: list[str] = []
            for position, (name, shape) in enumerate(old):
                parameter = (nameless.pop(0) if nameless else None) if name is None else self.known.get(name)
                if parameter is None or left.pop(id(parameter), None) is None:
                    missing.append(name or "one without a name")
                elif list(parameter.shape) != shape:
                    had, has = tuple(shape), tuple(parameter.shape)
                    wrong.append(f"{name or f'parameter {position}'} of shape {had} in the checkpoint, {has} now")
                else:
                    found[id(parameter)] = position
            added = [self.names.get(parameter_id, "one without a name") for parameter_id in left]
            for only, there in ((missing, "in the checkpoint"), (added, "now")):
                if only:
                    wrong.append(f"only {there}: {listed(only, 5)}" + (f" (group {index})" if len(saved) > 1 else ""))
            orders.append([found.get(id(parameter), -1) for parameter in now])
        if wrong:
            what = f"{self.origin}: part {self.path!r} has the state of other parameters"
            fix = "build the optimizer over the parameters, and in the groups, that it had when it was saved"
            raise CheckpointError(what, have="; ".join(wrong), fix=fix, where=False)
        return orders

    def _check_movable(self, saved: list[list[Any]]) -> None:
        """Raise CheckpointError for another order if state belongs to no single parameter."""
        kind, reason = type(self.optimizer).__name__, ""
        if not _is_usual(self.state) or _sizes(self.state) != [len(group) for group in saved]:
            reason = f"{kind} gives its state a form of its own"
        elif isinstance(self.optimizer, LBFGS) and self.state["state"]:
            reason = f"the vectors of {kind} run over all parameters"
        else:
            shapes = [shape for group in saved for _, shape in group]
            for number, shape in zip(_numbers(self.state), shapes, strict=True):
                large = [held for held in _shapes(self.state["state"].get(number)) if prod(held) > max(1, prod(shape))]
                if large:
                    reason = f"{kind} holds a tensor of shape {large[0]} for a parameter of shape {tuple(shape)}"
                    break
        if reason:
            first = [str(name) for group in saved for name, _ in group]
            what = f"{self.origin}: part {self.path!r} has its parameters in another order now"
            want = f"the order that it was saved in: {listed(first, 6)}"
            fix = "build the optimizer with its parameters in that order"
            raise CheckpointError(what, have=reason, want=want, fix=fix, where=False)


def _check_state(optimizer: Optimizer, state: Any, saved: list[list[Any]]) -> None:
    """Raise FormError for a state that no step of a torch optimizer could use.

    `saved`: names and shapes of the parameters of the state.
    """
    groups, entries = state["param_groups"], state["state"]
    numbers = _numbers(state)
    is_counted = _sizes(state) == [len(group) for group in saved] and numbers == list(range(len(numbers)))
    if not is_counted or not set(entries) <= set(numbers):
        raise FormError("the numbers of the parameters are not those of the state")
    for group, options, parameters in zip(optimizer.param_groups, groups, saved, strict=False):
        fits = {name: partial(_fits, group[name]) for name in optimizer.defaults if name in group}
        check_form({**dict.fromkeys(fits), **options}, **fits)
        if type(optimizer).__name__ not in _OTHER_SHAPES:
            _check_entries(options, [tuple(shape) for _, shape in parameters], entries)


def _check_entries(group: Mapping[str, Any], shapes: list[tuple[int, ...]], entries: Mapping[Any, Any]) -> None:
    """Raise FormError if state entries of a group differ in keys or types, or if a shape is wrong."""
    first: Mapping[str, Any] = {}
    for number, shape in zip(group["params"], shapes, strict=True):
        entry = entries.get(number, {})
        check_form(entry)
        first = first or entry
        if entry and entry.keys() != first.keys():
            raise FormError("the parameters of a group have different state")
        for key, value in entry.items():
            if not _is_like(first[key], value, shape):
                raise FormError(f"{key!r} of a parameter is a {type(value).__name__}, or of another shape")
    for option, key in (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg")):
        if group.get(option) and first and key not in first:
            raise FormError(f"the parameters of a group have no {key!r}")


def _is_like(first: Any, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a state value of a parameter of this shape has the type of `first`, that of another parameter."""
    if isinstance(value, Tensor | LazyTensor):
        return isinstance(first, Tensor | LazyTensor) and tuple(value.shape) in ((), shape)
    return is_number(first) if is_number(value) else value is None and first is None


def _fits(mine: Any, saved: Any) -> bool:
    """Return whether a saved setting can replace the setting of an optimizer."""
    if isinstance(mine, tuple | list):
        return isinstance(saved, tuple | list) and len(mine) == len(saved) and all(map(_fits, mine, saved))
    if isinstance(mine, Tensor) or is_number(mine):
        return isinstance(saved, Tensor) or (is_number(saved) and bool(saved >= 0 or (saved < 0 and mine < 0)))
    return saved is None or mine is None or type(saved) is type(mine)


def _is_usual(state: Any) -> bool:
    """Return whether a state has the form of `torch.optim.Optimizer.state_dict`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    numbers = [group.get("params") for group in groups]
    return all(isinstance(params, list) and all(type(n) is int for n in params) for params in numbers)


def _numbers(state: Mapping[str, Any]) -> list[int]:
    """Return the parameter numbers in an optimizer state, in order."""
    return [number for group in state["param_groups"] for number in group["params"]]


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """Return the number of parameters of each group."""
    return [len(group["params"]) for group in state["param_groups"]]


def _moved(state: Mapping[str, Any], orders: list[list[int]]) -> dict[str, Any]:
    """Return the state reordered. `orders`: the saved position of each parameter, by group."""
    moved: dict[Any, Any] = {}
    groups = []
    for group, order in zip(state["param_groups"], orders, strict=True):
        numbers, names = group["params"], group.get("param_names")
        moved |= {numbers[old]: numbers[now] for now, old in enumerate(order)}
        groups.append(dict(group) if names is None else {**group, "param_names": [names[old] for old in order]})
    of_parameters = {moved.get(number, number): entry for number, entry in state["state"].items()}
    return {**state, "state": of_parameters, "param_groups": groups}


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all tensors in the state of one parameter, also in lists and dicts."""
    if isinstance(value, Tensor | LazyTensor):
        yield tuple(value.shape)
    items: Sequence[Any] = ()
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    for item in items:
        yield from _shapes(item)
