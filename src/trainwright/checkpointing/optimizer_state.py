"""Optimizer state by parameter name: a resumed run may build its optimizer with the parameters in another order.

Torch stores the state by position. Beside it a checkpoint has the name and the shape of each parameter; state goes to
the parameter of the same name in the same group. Where a state belongs to no single parameter, as that of LBFGS, the
order must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan, prod
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainwright.checkpointing.load import DamagedError
from trainwright.core.checks import is_number
from trainwright.core.errors import CheckpointError, listed
from trainwright.distributed.pieces import LazyTensor
from trainwright.protocols import Stateful, Tree
from trainwright.update.optimizer_steps import NamedParts

PARAMETERS = "optimizer_parameters"
"""The part of a checkpoint that holds the names and shapes of the parameters of each optimizer, group by group."""
_OTHER_SHAPES = ("LBFGS", "Adafactor")
"""Optimizers of torch whose state tensors need not have the shapes of their parameters."""


def parameters_of_optimizers(parts: Mapping[str, Stateful]) -> dict[str, Tree]:
    """Return name and shape of each parameter of each optimizer, by group; a name is None where no module has it.

    Names come from the modules among the parts: the model first, then the loss.
    """
    names = first_names(dict(named_parameters(parts)))
    return {
        path: _names_and_shapes(optimizer, names)
        for part in parts
        for path, optimizer in optimizers_of(parts[part], part)
    }


def in_current_order(
    parts: Mapping[str, Stateful], tree: dict[str, Tree], saved: Any, *, origin: str
) -> tuple[dict[str, Tree], list[str]]:
    """Put the state of each optimizer into the current order of its parameters; return lines for the header too.

    `saved` is what `parameters_of_optimizers` returned; None for a checkpoint without names. State goes by the name of
    its parameter within a group, without a name by position. CheckpointError where parameters or shapes are others,
    or where state belongs to no single parameter and the order is another one.
    """
    if saved is not None and not isinstance(saved, Mapping):
        raise DamagedError(f"{origin} is damaged: its {PARAMETERS!r} cannot be read", origin)
    known = dict(named_parameters(parts))
    lines: list[str] = []

    def ordered(part: Any, state: Any, path: str) -> Any:
        if isinstance(part, Optimizer):
            named = None if saved is None else saved.get(path)
            return _Matching(path, part, state, known=known, origin=origin).ordered(named, lines)
        if isinstance(part, NamedParts) and isinstance(state, Mapping):
            return {name: ordered(part.parts.get(name), one, f"{path}.{name}") for name, one in state.items()}
        return state

    return {name: ordered(parts.get(name), state, name) for name, state in tree.items()}, lines


def optimizers_of(part: Any, path: str) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers of a part, each with its path."""
    if isinstance(part, Optimizer):
        yield path, part
    for name, one in part.parts.items() if isinstance(part, NamedParts) else ():
        yield from optimizers_of(one, f"{path}.{name}")


def named_parameters(parts: Mapping[str, Stateful]) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of every parameter of the modules among the parts: of the model, the loss, then of others."""
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for root in sorted(modules, key=lambda name: (name != "model", name != "loss")):
        for name, parameter in modules[root].named_parameters(remove_duplicate=False):
            yield f"{root}.{name}", parameter


def first_names(named: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the first name of each parameter, by its id."""
    names: dict[int, str] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), name)
    return names


def _names_and_shapes(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[Any]]:
    return [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]


class _Matching:
    """The saved state of one optimizer, and the parameters that it has now."""

    def __init__(
        self, path: str, optimizer: Optimizer, state: Any, *, known: Mapping[str, Tensor], origin: str
    ) -> None:
        self.path, self.optimizer, self.state, self.known, self.origin = path, optimizer, state, known, origin
        self.names = first_names(known)
        self.groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self.is_usual = _is_usual(state)
        """Whether the state has the form of torch's, so that it can be put into another order."""

    def ordered(self, saved: Any, lines: list[str]) -> Any:
        """Return the state in the current order; append lines for the header to `lines`."""
        self._check_form()
        state = self.state
        if saved is None:
            lines.append(f"resumed: no parameter names of part {self.path!r} are saved: matched by position and shape")
        elif not self._is_current(saved):
            state = self._reordered(saved, lines)
        self._check_shapes(state)
        return state

    def _is_current(self, saved: Any) -> bool:
        """Return whether the parameters are the saved ones, all of them named, in the same order."""
        current = _names_and_shapes(self.optimizer, self.names)
        named = all(name is not None for group in current for name, _ in group)
        return bool(saved == current and named and self._sizes in (None, [len(group) for group in current]))

    def _reordered(self, saved: Any, lines: list[str]) -> Any:
        """Return the state matched by name, and by position where there is none."""
        if not self._is_list(saved):
            what = f"{self.origin} is damaged: the parameters of part {self.path!r} cannot be read"
            raise DamagedError(what, self.origin)
        if nameless := sum(name is None for group in saved for name, _ in group):
            what = "parameter of part" if nameless == 1 else "parameters of part"
            lines.append(f"resumed: {nameless} {what} {self.path!r} without a name: matched by position and shape")
        orders = self._orders(saved)
        if all(order == sorted(order) for order in orders):
            return self.state
        self._check_movable(saved)
        return _moved(self.state, orders)

    def _orders(self, saved: list[list[Any]]) -> list[list[int]]:
        """Return for each parameter its position in the saved group; refuse other parameters or shapes."""
        orders: list[list[int]] = []
        wrong: list[str] = []
        if len(saved) != len(self.groups):
            wrong.append(f"{len(saved)} parameter groups in the checkpoint, {len(self.groups)} now")
        for index, (old, now) in enumerate(zip(saved, self.groups, strict=False)):
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
            added = [self.names.get(one, "one without a name") for one in left]
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
        """Refuse another order where state belongs to no single parameter."""
        kind, reason = type(self.optimizer).__name__, ""
        if not self.is_usual:
            reason = f"{kind} gives its state a form of its own"
        elif isinstance(self.optimizer, LBFGS) and self.state["state"]:
            reason = f"the vectors of {kind} run over all parameters"
        else:
            shapes = [shape for group in saved for _, shape in group]
            for number, shape in zip(_numbers(self.state), shapes, strict=True):
                large = [one for one in _shapes(self.state["state"].get(number)) if prod(one) > max(1, prod(shape))]
                if large:
                    reason = f"{kind} holds a tensor of shape {large[0]} for a parameter of shape {tuple(shape)}"
                    break
        if reason:
            first = [str(name) for group in saved for name, _ in group]
            what = f"{self.origin}: part {self.path!r} has its parameters in another order now"
            want = f"the order that it was saved in: {listed(first, 6)}"
            fix = "build the optimizer with its parameters in that order"
            raise CheckpointError(what, have=reason, want=want, fix=fix, where=False)

    @property
    def _sizes(self) -> list[int] | None:
        """Parameters per group in the state; None where it has a form of its own."""
        return [len(group["params"]) for group in self.state["param_groups"]] if self.is_usual else None

    @property
    def _is_known(self) -> bool:
        """Whether the optimizer is one of torch's, or of this package."""
        return type(self.optimizer).__module__.startswith(("torch.optim.", "trainwright."))

    def _check_form(self) -> None:
        """Raise DamagedError for state that no step could use, for optimizers whose needs are known."""
        if not self._is_known:
            return
        wrong = "" if self.is_usual else "it has no groups or no state"
        if self.is_usual:
            numbers = _numbers(self.state)
            if numbers != list(range(len(numbers))) or not set(self.state["state"]) <= set(numbers):
                wrong = "the numbers of the parameters are not those of the state"
        uniform = type(self.optimizer).__name__ not in _OTHER_SHAPES
        groups = zip(self.optimizer.param_groups, self.state["param_groups"] if self.is_usual else (), strict=False)
        for group, saved in groups:
            options = {name: group[name] for name in self.optimizer.defaults if name in group}
            wrong = wrong or _wrong_option(options, saved) or _wrong_state(saved, self.state["state"], uniform=uniform)
        if wrong:
            raise DamagedError(f"{self.origin} is damaged: in part {self.path!r} {wrong}", self.origin)

    def _check_shapes(self, state: Any) -> None:
        """Refuse state of other shapes than the parameters', for optimizers of torch that store it in their shapes."""
        kind = type(self.optimizer)
        if not self.is_usual or not self._is_known or kind.__name__ in _OTHER_SHAPES:
            return
        parameters = [parameter for group in self.groups for parameter in group]
        for position, (number, parameter) in enumerate(zip(_numbers(state), parameters, strict=False)):
            for shape in _shapes(state["state"].get(number)):
                if shape and shape != tuple(parameter.shape):
                    name = self.names.get(id(parameter), f"parameter {position}")
                    what = f"{self.origin}: part {self.path!r} has state of shape {shape} for {name}"
                    want = f"the shape of the parameter, {tuple(parameter.shape)}"
                    fix = "build the optimizer with its parameters in the order that they had when it was saved"
                    raise CheckpointError(what, want=want, fix=fix, where=False)

    def _is_list(self, saved: Any) -> bool:
        """Return whether it is a list of groups of names and shapes, as many as the state has parameters."""
        if not isinstance(saved, list) or not all(isinstance(group, list) for group in saved):
            return False
        entries = [entry for group in saved for entry in group]
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) for entry in entries):
            return False
        named = all(name is None or isinstance(name, str) for name, _ in entries)
        shaped = all(type(n) is int for _, shape in entries for n in shape)
        return named and shaped and self._sizes in (None, [len(group) for group in saved])


def _wrong_option(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return what is wrong with the settings of a saved group, given those of the group that it is loaded into."""
    for name, mine in group.items():
        if name not in saved:
            if isinstance(mine, int | float) and not isinstance(mine, bool):
                return f"{name!r} is missing"
        elif not _fits(mine, saved[name]):
            return f"{name!r} is a {type(saved[name]).__name__}, or of another size or sign"
    return ""


def _fits(mine: Any, saved: Any) -> bool:
    """Return whether a saved setting can replace the one that an optimizer has."""
    if isinstance(mine, Tensor) or isinstance(saved, Tensor):
        return isinstance(saved, Tensor) or is_number(saved)
    if isinstance(mine, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(mine, int | float):
        return is_number(saved) and not isnan(saved) and (saved >= 0 or mine < 0)
    if isinstance(mine, tuple | list):
        return isinstance(saved, tuple | list) and len(mine) == len(saved) and all(map(_fits, mine, saved))
    return saved is None or mine is None or type(saved) is type(mine)


def _wrong_state(group: Mapping[str, Any], state: Mapping[Any, Any], *, uniform: bool) -> str:
    """Return what is wrong with the state of a saved group; `uniform`: all its parameters have the same kinds."""
    states = [state[number] for number in group["params"] if number in state]
    if not all(isinstance(one, Mapping) for one in states):
        return "the state of a parameter is no dict"
    filled = [one for one in states if one and uniform]
    if any(one.keys() != filled[0].keys() for one in filled):
        return "the parameters of a group have different state"
    for name in filled[0] if filled else ():
        kinds = {_kind_of(one[name]) for one in filled}
        if len(kinds) > 1 or "" in kinds:
            return f"{name!r} of a parameter is neither a number nor a tensor, or not as that of the others"
    needed = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
    lost = [name for option, name in needed.items() if group.get(option) and filled and name not in filled[0]]
    return f"the parameters of a group have no {lost[0]!r}" if lost else ""


def _kind_of(value: Any) -> str | None:
    """Return the kind of a value in the state of a parameter; empty where none such is ever written."""
    if isinstance(value, Tensor | LazyTensor):
        return "tensor"
    if isinstance(value, list | tuple | Mapping):
        return "nested"
    return None if value is None else "number" if is_number(value) else ""


def _is_usual(state: Any) -> bool:
    """Return whether a state has the form of `torch.optim.Optimizer.state_dict`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    numbers = [group.get("params") for group in groups]
    return all(isinstance(one, list) and all(type(n) is int for n in one) for one in numbers)


def _numbers(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the parameters in the state of an optimizer, in order."""
    return [number for group in state["param_groups"] for number in group["params"]]


def _moved(state: Mapping[str, Any], orders: list[list[int]]) -> dict[str, Any]:
    """Return the state as the optimizer would have it with its parameters in another order."""
    moved: dict[Any, Any] = {}
    groups = []
    for group, order in zip(state["param_groups"], orders, strict=True):
        numbers, names = group["params"], group.get("param_names")
        moved |= {numbers[old]: numbers[now] for now, old in enumerate(order)}
        groups.append(dict(group) if names is None else {**group, "param_names": [names[old] for old in order]})
    of_parameters = {moved.get(number, number): one for number, one in state["state"].items()}
    return {**state, "state": of_parameters, "param_groups": groups}


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the tensors in the state of one parameter, those in lists and dicts included."""
    if isinstance(value, Tensor | LazyTensor):
        yield tuple(value.shape)
    items: Sequence[Any] = ()
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    for item in items:
        yield from _shapes(item)
