"""The parts of a run as one tree: gathered for a checkpoint, and given back strictly both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, prod
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainwright.core.checks import FormError, check_form, is_number
from trainwright.core.device import keep_dtypes
from trainwright.core.errors import CheckpointError, TrainwrightError, first_line, listed
from trainwright.core.rng import is_random_state, random_state, set_random_state
from trainwright.distributed.pieces import LazyTensor
from trainwright.protocols import Stateful, Tree

PARAMETERS = "optimizer_parameters"
"""The part of a checkpoint that holds the names and shapes of the parameters of each optimizer, group by group."""
_ANEW = "leave resume out, and give Checkpoint() a new directory, to begin a new run"
NEVER_FRESH = {
    "model": 'load_weights("weights.safetensors", model) before a new run',
    "data": "resume_data=False, for other data",
    **dict.fromkeys(("progress", "totals", "random"), _ANEW),
}
"""Parts that no resume starts anew, and what to write instead."""
ALWAYS = frozenset({"model", "progress", "totals", "data", "state", "random"})
"""Parts of every run."""
OTHER_SHAPES = ("LBFGS", "Adafactor")
"""Optimizers of torch whose state tensors need not have the shapes of their parameters."""


class DamagedError(CheckpointError):
    """A checkpoint of which every byte could be read, and that cannot be loaded: changed, or saved by other code."""

    def __init__(self, text: str, origin: str, *, early: bool = False) -> None:
        super().__init__(text)
        self.origin = origin
        """The path of the checkpoint."""
        self.early = early
        """Whether it was found before any hook of the user ran."""


class Random:
    """Part `random`: the states at the start of the epoch in hand, and at the boundary where it was saved."""

    def __init__(self) -> None:
        self.epoch_start: dict[str, Any] = {}
        """Empty until the iterator of the epoch in hand is about to be made: a run may stop before."""
        self.loaded: dict[str, Any] | None = None
        """The state of the boundary, until it has been put back."""
        self.stands = False
        """Whether the process draws from there already, though the iterator of the epoch is still to be made."""
        self.kept: dict[str, Any] | None = None
        """The state before the window in hand was fetched, where a run can end inside one."""
        self.uses_kept = False
        """Whether that is the state of the boundary: the run has ended inside a window."""

    def state_dict(self) -> Tree:
        """Both states."""
        kept = self.kept if self.uses_kept else None if self.stands else self.loaded
        return {"epoch_start": self.epoch_start, "now": random_state() if kept is None else kept}

    def load_state_dict(self, tree: Tree) -> None:
        """Keep both states; the iterator of the epoch is made between setting the one and the other."""
        check_form(tree, epoch_start=lambda state: state == {} or is_random_state(state), now=is_random_state)
        self.epoch_start, self.loaded = tree["epoch_start"], tree["now"]

    def stand(self) -> None:
        """Have the process draw what followed the boundary, for a pause that comes before the epoch goes on."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.stands = True

    def put_back(self) -> None:
        """Have the process draw what followed the boundary; for one between two epochs, or where nothing is left."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.epoch_start, self.loaded = {}, None


class Held:
    """A part made of two functions, for state that no object of its own holds."""

    def __init__(self, give: Callable[[], Tree], take: Callable[[Tree], None]) -> None:
        self.state_dict = give
        self.load_state_dict = take


def gather(parts: Mapping[str, Stateful]) -> dict[str, Tree]:
    """Collect every part's state."""
    return {name: part.state_dict() for name, part in parts.items()}


def parameters_of_optimizers(parts: Mapping[str, Stateful]) -> dict[str, Tree]:
    """The name and the shape of each parameter of each optimizer, by group; a name is None where no module has it.

    Names come from the modules among the parts: the model first, then the loss.
    """
    names = first_names(dict(named_parameters(parts)))
    return {
        path: [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
        for part in parts
        for path, optimizer in _optimizers(parts[part], part)
    }


def check(parts: Mapping[str, Stateful], tree: Mapping[str, Tree], *, origin: str, fresh: Sequence[str] = ()) -> None:
    """Raise CheckpointError where a part is missing or not used, or where a module has other tensors.

    `fresh`: parts that start anew already; the line to write names them too.
    """
    missing, unused = sorted(set(parts) - set(tree)), sorted(map(str, set(tree) - set(parts)))
    if lost := ALWAYS.intersection(missing):
        raise DamagedError(f"{origin} is damaged: it has no part {min(lost)!r}", origin)
    if missing or unused:
        line = fresh_line([*fresh, *missing, *unused])
        raise CheckpointError(
            f"{origin} does not fit this Trainer",
            have=f"missing {missing}, not used {unused}",
            want=f"the parts {sorted(parts)}",
            fix=f"{line}, which starts them anew; or build the Trainer as when it was saved"
            if line
            else "build the Trainer as when it was saved",
            where=False,
        )
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _check_tensors(name, part, tree[name], origin=origin)


def fresh_line(names: Sequence[str]) -> str:
    """The line that starts the parts of these names anew; empty where one of them cannot be."""
    if not NEVER_FRESH.keys().isdisjoint(names):
        return ""
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"fit(..., resume_fresh=({quoted}{',' * (len(names) == 1)}))"


def in_order(
    parts: Mapping[str, Stateful], tree: dict[str, Tree], saved: Any, *, origin: str
) -> tuple[dict[str, Tree], list[str]]:
    """Put the state of each optimizer into the order that its parameters have now, and say what has no name.

    `saved` is what `parameters_of_optimizers` gave; None for a checkpoint without names. State goes by the name of its
    parameter within a group, without a name by position. CheckpointError where parameters or shapes are others, or
    where state belongs to no single parameter and the order is another one.
    """
    known = dict(named_parameters(parts))
    lines: list[str] = []

    def ordered(part: Any, state: Any, path: str) -> Any:
        if isinstance(part, Optimizer):
            named = None if saved is None else saved.get(path)
            return _Matching(path, part, state, known=known, origin=origin).ordered(named, lines)
        inner = getattr(part, "parts", None)
        if isinstance(inner, Mapping) and isinstance(state, Mapping):
            return {name: ordered(inner.get(name), one, f"{path}.{name}") for name, one in state.items()}
        return state

    if saved is not None and not isinstance(saved, Mapping):
        raise DamagedError(f"{origin} is damaged: its {PARAMETERS!r} cannot be read", origin)
    return {name: ordered(parts.get(name), state, name) for name, state in tree.items()}, lines


def restore(parts: Mapping[str, Stateful], tree: Mapping[str, Tree], *, origin: str) -> list[str]:
    """Give every part its state, model and progress first, random last; after `check`. Returns what the parts report.

    Raises CheckpointError where the state of a part is of another form.
    """
    reports = []
    # Progress comes before the schedule, which is planned by the lengths that finished epochs had.
    for name in sorted(parts, key=lambda name: (name != "model", name != "progress", name == "random")):
        part = parts[name]
        try:
            said = part.load_state_dict(tree[name])
        except TrainwrightError:
            raise  # it says what differs, and what to do
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError, FormError) as error:
            why = str(error) if isinstance(error, FormError) else first_line(error)
            why = f"its saved state has no {error}" if isinstance(error, KeyError) else why
            raise DamagedError(f"{origin}: part {name!r} cannot be loaded: {why}", origin) from error
        except ValueError as error:
            if name in ("progress", "totals", "random"):  # no user's code, and no mismatch of settings
                raise DamagedError(f"{origin}: part {name!r} cannot be loaded: {error}", origin) from error
            raise CheckpointError(f"{origin}: part {name!r} cannot be loaded: {error}", where=False) from error
        if name == "optimizer" and _are_of_their_dtypes(parts, tree):
            for path, optimizer in _optimizers(part, name):
                keep_dtypes(optimizer, tree[name] if path == name else tree[name][path.removeprefix(f"{name}.")])
        if isinstance(said, str):
            reports.append(said)
    return reports


def _are_of_their_dtypes(parts: Mapping[str, Stateful], tree: Mapping[str, Tree]) -> bool:
    """Whether all weights have the dtypes that they were saved with."""
    roots = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = [(tree[name].get(key), own) for name, root in roots.items() for key, own in root.named_parameters()]
    return all(saved.dtype == own.dtype for saved, own in named if isinstance(saved, Tensor))


def _optimizers(part: Any, path: str) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers of a part, each with the way to it."""
    if isinstance(part, Optimizer):
        yield path, part
    inner = getattr(part, "parts", None)
    for name, one in inner.items() if isinstance(inner, Mapping) else ():
        yield from _optimizers(one, f"{path}.{name}")


def named_parameters(parts: Mapping[str, Stateful]) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter of the modules among the parts: of the model, then of the loss, then of others."""
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for root in sorted(modules, key=lambda name: (name != "model", name != "loss")):
        for name, parameter in modules[root].named_parameters(remove_duplicate=False):
            yield f"{root}.{name}", parameter


def first_names(named: Mapping[str, Tensor]) -> dict[int, str]:
    """The first name of each parameter, by its id."""
    names: dict[int, str] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), name)
    return names


class _Matching:
    """The state of one optimizer, and the parameters that it has now."""

    def __init__(
        self, path: str, optimizer: Optimizer, state: Any, *, known: Mapping[str, Tensor], origin: str
    ) -> None:
        self.path, self.optimizer, self.state, self.known, self.origin = path, optimizer, state, known, origin
        self.groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self.is_usual = _is_usual(state)
        """Whether the state has the form that torch gives it, so that it can be put into another order."""

    def ordered(self, saved: Any, lines: list[str]) -> Any:
        """The state in the order of now; lines for the header are added to `lines`."""
        if saved is None:
            lines.append(f"resumed: no parameter names of part {self.path!r} are saved: matched by position and shape")
            self._check_form()
            self._check_shapes(self.state)
            return self.state
        if not self._is_list(saved):
            what = f"{self.origin} is damaged: the parameters of part {self.path!r} cannot be read"
            raise DamagedError(what, self.origin)
        if nameless := sum(name is None for group in saved for name, _ in group):
            what = "parameter of part" if nameless == 1 else "parameters of part"
            lines.append(f"resumed: {nameless} {what} {self.path!r} without a name: matched by position and shape")
        self._check_form()
        orders = self._orders(saved)
        state = self.state
        if any(order != sorted(order) for order in orders):
            self._check_movable(saved)
            state = _moved(state, orders)
        self._check_shapes(state)
        return state

    def _orders(self, saved: list[list[Any]]) -> list[list[int]]:
        """For each parameter of now its position in the saved group."""
        orders: list[list[int]] = []
        wrong: list[str] = []
        if len(saved) != len(self.groups):
            wrong.append(f"{len(saved)} parameter groups in the checkpoint, {len(self.groups)} now")
        for index, (old, now) in enumerate(zip(saved, self.groups, strict=False)):
            names = first_names(self.known)
            left = {id(parameter): parameter for parameter in now}
            nameless = [parameter for parameter in now if id(parameter) not in names]
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
            added = [names.get(one, "one without a name") for one in left]
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
        """Refuse another order where a state does not belong to one parameter alone."""
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
    def _is_known(self) -> bool:
        """Whether the optimizer is one of torch's, or of this package."""
        return type(self.optimizer).__module__.startswith(("torch.optim.", "trainwright."))

    def _check_form(self) -> None:
        """Raise DamagedError for state that no step could use, where it is known what a step needs."""
        if not self._is_known:
            return
        wrong = "" if self.is_usual else "it has no groups or no state"
        if self.is_usual:
            numbers = _numbers(self.state)
            if numbers != list(range(len(numbers))) or not set(self.state["state"]) <= set(numbers):
                wrong = "the numbers of the parameters are not those of the state"
        alike = type(self.optimizer).__name__ not in OTHER_SHAPES
        groups = zip(self.optimizer.param_groups, self.state["param_groups"] if self.is_usual else (), strict=False)
        for group, saved in groups:
            options = {name: group[name] for name in self.optimizer.defaults if name in group}
            wrong = wrong or _wrong_option(options, saved) or _wrong_state(saved, self.state["state"], alike=alike)
        if wrong:
            raise DamagedError(f"{self.origin} is damaged: in part {self.path!r} {wrong}", self.origin)

    def _check_shapes(self, state: Any) -> None:
        """Refuse state of other shapes than the parameters', where torch keeps it in their shapes."""
        kind = type(self.optimizer)
        if not self.is_usual or not self._is_known or kind.__name__ in OTHER_SHAPES:
            return
        parameters = [parameter for group in self.groups for parameter in group]
        names = first_names(self.known)
        for position, (number, parameter) in enumerate(zip(_numbers(state), parameters, strict=False)):
            for shape in _shapes(state["state"].get(number)):
                if shape and shape != tuple(parameter.shape):
                    name = names.get(id(parameter), f"parameter {position}")
                    what = f"{self.origin}: part {self.path!r} has state of shape {shape} for {name}"
                    want = f"the shape of the parameter, {tuple(parameter.shape)}"
                    fix = "build the optimizer with its parameters in the order that they had when it was saved"
                    raise CheckpointError(what, want=want, fix=fix, where=False)

    def _is_list(self, saved: Any) -> bool:
        """Whether it is a list of groups of names and shapes, as many as the state has parameters."""
        if not isinstance(saved, list) or not all(isinstance(group, list) for group in saved):
            return False
        entries = [entry for group in saved for entry in group]
        if not all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) for entry in entries):
            return False
        sizes = [len(group["params"]) for group in self.state["param_groups"]] if self.is_usual else None
        named = all(name is None or isinstance(name, str) for name, _ in entries)
        shaped = all(type(n) is int for _, shape in entries for n in shape)
        return named and shaped and (sizes is None or sizes == [len(group) for group in saved])


def _wrong_option(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """What is wrong with the settings of a saved group, given those of the group that it is loaded into."""
    for name, mine in group.items():
        if name not in saved:
            if isinstance(mine, int | float) and not isinstance(mine, bool):
                return f"{name!r} is missing"
        elif not _is_alike(mine, saved[name]):
            return f"{name!r} is a {type(saved[name]).__name__}, or of another size or sign"
    return ""


def _is_alike(mine: Any, saved: Any) -> bool:
    """Whether a saved setting can stand for the one that an optimizer has."""
    if isinstance(mine, Tensor) or isinstance(saved, Tensor):
        return isinstance(saved, Tensor) or is_number(saved)
    if isinstance(mine, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(mine, int | float):
        return is_number(saved) and not isnan(saved) and (saved >= 0 or mine < 0)
    if isinstance(mine, tuple | list):
        return isinstance(saved, tuple | list) and len(mine) == len(saved) and all(map(_is_alike, mine, saved))
    return saved is None or mine is None or type(saved) is type(mine)


def _wrong_state(group: Mapping[str, Any], state: Mapping[Any, Any], *, alike: bool) -> str:
    """What is wrong with the state of the parameters of a saved group; `alike`: what one of them has all have."""
    states = [state[number] for number in group["params"] if number in state]
    if not all(isinstance(one, Mapping) for one in states):
        return "the state of a parameter is no dict"
    filled = [one for one in states if one and alike]
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
    """Of which kind a value in the state of a parameter is; an empty text where it is of none that is written."""
    if isinstance(value, Tensor | LazyTensor):
        return "tensor"
    if isinstance(value, list | tuple | Mapping):
        return "nested"
    return None if value is None else "number" if is_number(value) else ""


def _is_usual(state: Any) -> bool:
    """Whether a state has the form of `torch.optim.Optimizer.state_dict`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    numbers = [group.get("params") for group in groups]
    return all(isinstance(one, list) and all(type(n) is int for n in one) for one in numbers)


def _numbers(state: Mapping[str, Any]) -> list[int]:
    """The numbers that stand for the parameters in the state of an optimizer, in order."""
    return [number for group in state["param_groups"] for number in group["params"]]


def _moved(state: Mapping[str, Any], orders: list[list[int]]) -> dict[str, Any]:
    """The state as the optimizer would have given it with its parameters in another order."""
    moved: dict[Any, Any] = {}
    groups = []
    for group, order in zip(state["param_groups"], orders, strict=True):
        numbers, names = group["params"], group.get("param_names")
        moved |= {numbers[old]: numbers[now] for now, old in enumerate(order)}
        groups.append(dict(group) if names is None else {**group, "param_names": [names[old] for old in order]})
    of_parameters = {moved.get(number, number): one for number, one in state["state"].items()}
    return {**state, "state": of_parameters, "param_groups": groups}


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors in the state of one parameter, those in lists and dicts included."""
    if isinstance(value, Tensor | LazyTensor):
        yield tuple(value.shape)
    items: Sequence[Any] = ()
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    for item in items:
        yield from _shapes(item)


def _check_tensors(name: str, module: nn.Module, saved: Mapping[str, Any], *, origin: str) -> None:
    if not isinstance(saved, Mapping):
        raise DamagedError(f"{origin} is damaged: part {name!r} is a {type(saved).__name__}", origin)
    own = module.state_dict()
    wrong = [
        f"{key} checkpoint {tuple(saved[key].shape)} model {tuple(value.shape)}"
        for key, value in own.items()
        if key in saved and hasattr(value, "shape") and hasattr(saved[key], "shape") and saved[key].shape != value.shape
    ]
    missing, unexpected = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    found = {"of another shape": wrong, "missing in the checkpoint": missing, f"not in the {name}": unexpected}
    if wrong or missing or unexpected:
        raise CheckpointError(
            f"{origin} is from another {name}: {len(wrong)} tensors differ in shape, "
            f"{len(missing)} are missing, {len(unexpected)} are not in the model",
            have="; ".join(f"{what}: {listed(keys, 5)}" for what, keys in found.items() if keys),
            want="the model as it was saved",
            fix=f"build the {name} as when it was saved, or leave resume out and give Checkpoint() a new directory",
        )
