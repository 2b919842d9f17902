"""Follows the channels of a layer through a model's graph: which layers make, scale and read them."""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from trainwright.core.errors import SettingError, first_line
from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import has_backward_hooks, has_forward_hooks, parameter_dict
from trainwright.modules.activations import release_all
from trainwright.modules.dry_run import Given
from trainwright.modules.flops import twin_on
from trainwright.modules.modes import evaluating

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAKERS = (nn.Linear, *CONVOLUTIONS)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS_OF_ROWS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_EACH = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.Identity, nn.Dropout, nn.AlphaDropout),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.LogSigmoid, nn.Threshold),
)
"""Modules that compute each element by itself."""
_WITHIN = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveMaxPool3d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ZeroPad2d, nn.Upsample),
)
"""Modules that compute each channel by itself, in the second dimension."""
_EACH_BY = frozenset(
    {
        *(torch.relu, torch.tanh, torch.sigmoid, torch.abs, torch.exp, torch.clamp, F.relu, F.relu6, F.leaky_relu),
        *(F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.tanh, F.sigmoid, F.hardtanh, F.hardswish, F.dropout),
        *(
            "relu",
            "relu_",
            "tanh",
            "sigmoid",
            "abs",
            "exp",
            "clamp",
            "contiguous",
            "clone",
            "detach",
            "float",
            "double",
        ),
    }
)
_WITHIN_BY = frozenset(
    {
        *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.interpolate),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.dropout2d, F.dropout3d),
        *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    }
)
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div)
_ARITHMETIC_OF = ("add", "add_", "sub", "mul", "mul_", "div")


@dataclass(frozen=True)
class Use:
    """A module beside the channels' maker, and how many of its features are one channel."""

    name: str
    repeat: int


@dataclass
class ChannelGroup:
    """The channels of one layer."""

    maker: str
    size: int
    norms: list[Use] = field(default_factory=list)
    readers: list[Use] = field(default_factory=list)
    why: str = ""
    """Why none of them can be removed; "" where they can."""


def groups_of(model: nn.Module, given: Given, what: str) -> dict[str, ChannelGroup]:
    """The channels of each linear layer and convolution, by its name, in the order in which they run.

    `what` is the function that errors speak of. SettingError where the forward cannot be followed.
    """
    twin = twin_on(model, None)
    release_all(twin)
    graph, values = _traced(twin, given, what)
    shapes = _shapes(twin, graph, values)
    follower = _Follower(model, graph, shapes)
    found = (follower.group(node) for node in graph.nodes if node.op == "call_module")
    groups = {group.maker: group for group in found if group is not None}
    for name, module in model.named_modules():
        if isinstance(module, MAKERS) and name not in groups:
            why = "it is not called as a plain layer (a class of its own, a parametrization, or not called at all)"
            groups[name] = ChannelGroup(name, 0, why=why)
    return groups


def _traced(twin: nn.Module, given: Given, what: str) -> tuple[fx.Graph, list[Any]]:
    """The graph of a forward, with what its parameters are given; what is not given has its default."""
    kinds = [one.kind for one in inspect.signature(twin.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        what = f"{what} cannot follow the forward of {type(twin).__name__}: it takes any number of inputs"
        raise SettingError(what, want="a forward that names its inputs")
    bound = inspect.signature(twin.forward).bind(*given.inputs, **given.keywords)
    known = set(bound.arguments)
    bound.apply_defaults()
    fixed = {name: value for name, value in bound.arguments.items() if name not in known or not _is_tensor(value)}
    try:
        with rng_preserved():
            graph = fx.Tracer().trace(twin, concrete_args=fixed or None)
    except Exception as error:  # the model's own forward runs on stand-ins, and may do anything with them
        raise SettingError(
            f"{what} cannot follow the forward of {type(twin).__name__}",
            have=first_line(error, 160),
            want="a forward that torch.fx traces: no branch on numbers, no loop over a tensor",
        ) from error
    return graph, list(bound.arguments.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _shapes(twin: nn.Module, graph: fx.Graph, values: list[Any]) -> dict[fx.Node, tuple[int, ...]]:
    """The shape of every tensor that a forward makes."""
    found: dict[fx.Node, tuple[int, ...]] = {}

    class ChannelInterpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found[n] = tuple(value.shape)
            return value

    with rng_preserved(), torch.no_grad(), evaluating(twin):
        ChannelInterpreter(fx.GraphModule(twin, graph)).run(
            *values
        )  # torch.fx has a placeholder for each parameter, in order
    return found


class _Follower:
    """Goes from a layer along its channels until each is read by another."""

    def __init__(self, model: nn.Module, graph: fx.Graph, shapes: dict[fx.Node, tuple[int, ...]]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._shapes = shapes
        called = [self._modules[str(node.target)] for node in graph.nodes if node.op == "call_module"]
        self._calls = Counter(map(id, called))
        holders = Counter(
            id(p) for one in set(self._modules.values()) for p in parameter_dict(one).values() if p is not None
        )
        self._shared = {key for key, n in holders.items() if n > 1}
        self._got = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        self._hooked = {name for name, module in self._modules.items() if _has_hooks(module)}

    def group(self, node: fx.Node) -> ChannelGroup | None:
        """The channels that this call makes; None where it is no layer of channels."""
        name = str(node.target)
        module: Any = self._modules[name]
        if type(module) not in MAKERS:
            return None
        conv = isinstance(module, CONVOLUTIONS)
        group = ChannelGroup(name, module.out_channels if conv else module.out_features)
        group.why = self._unfit(name, module)
        if not group.why:
            dim = len(self._shapes[node]) - 1 - (len(module.kernel_size) if conv else 0)
            if conv and dim != 1:
                group.why = "its input has no rows"
            else:
                self._follow(node, group, dim=dim, repeat=1)
        if not group.why and not group.readers:
            group.why = "no other layer reads its channels"
        return group

    def _unfit(self, name: str, module: Any) -> str:
        """Why a module's weights cannot be cut; "" where they can."""
        if getattr(module, "groups", 1) != 1:
            return f"{name} is a grouped convolution"
        if self._calls[id(module)] > 1:
            return f"{name} is called {self._calls[id(module)]} times"
        if parametrize.is_parametrized(module) or isinstance(vars(module).get("weight"), Tensor):
            return f"the weight of {name} is computed from others (a mask or a parametrization)"
        if any(id(p) in self._shared for p in parameter_dict(module).values() if p is not None):
            return f"{name} shares its weights"
        if any(target.startswith(f"{name}.") for target in self._got):
            return f"the weight of {name} is read beside its forward"
        return f"{name} has hooks" if _has_hooks(module) else ""

    def _follow(self, node: fx.Node, group: ChannelGroup, *, dim: int, repeat: int) -> None:
        """Go on from where channels are in dimension `dim`, each of them `repeat` features wide."""
        for user in node.users:
            between = (_around(node) ^ _around(user)) & self._hooked
            if between:
                group.why = f"its channels pass {min(between)}, which has hooks"
            if group.why:
                return
            if user.op == "call_module":
                self._module(node, user, group, dim=dim, repeat=repeat)
            elif user.op == "output":
                group.why = "its channels are the model's output"
            else:
                self._function(node, user, group, dim=dim, repeat=repeat)

    def _module(self, node: fx.Node, user: fx.Node, group: ChannelGroup, *, dim: int, repeat: int) -> None:
        name, shape = str(user.target), self._shapes[node]
        module: Any = self._modules[name]
        kind = type(module)
        reads = (kind is nn.Linear and dim == len(shape) - 1) or (kind in CONVOLUTIONS and dim == 1 and repeat == 1)
        scales = kind in _NORMS or (kind in _NORMS_OF_ROWS and len(shape) > 2)
        if reads or (scales and dim == 1):
            group.why = self._unfit(name, module)
            (group.readers if reads else group.norms).append(Use(name, repeat))
            if scales:
                self._follow(user, group, dim=dim, repeat=repeat)
        elif kind in _EACH or (kind in _WITHIN and dim == 1 and len(shape) > 2):
            self._follow(user, group, dim=dim, repeat=repeat)
        elif kind is nn.Flatten:
            self._flat(node, user, group, dim=dim, repeat=repeat, whole=(module.start_dim, module.end_dim) == (1, -1))
        else:
            group.why = f"its channels go into {name} ({kind.__name__}), which is not known"

    def _function(self, node: fx.Node, user: fx.Node, group: ChannelGroup, *, dim: int, repeat: int) -> None:
        target: Any = user.target
        others = [one for one in user.all_input_nodes if one is not node]
        if not others and (target in _EACH_BY or (target in _WITHIN_BY and dim == 1)):
            self._follow(user, group, dim=dim, repeat=repeat)
        elif target in (torch.flatten, "flatten"):
            self._flat(node, user, group, dim=dim, repeat=repeat, whole=_from_second(user))
        elif target in ("view", "reshape", torch.reshape) and self._is_flat(node, user):
            self._flat(node, user, group, dim=dim, repeat=repeat, whole=True)
        elif target in ("mean", "sum", torch.mean, torch.sum):
            self._reduced(node, user, group, dim=dim, repeat=repeat)
        elif target in _ARITHMETIC or target in _ARITHMETIC_OF:
            if others:
                group.why = f"its channels meet those of {others[0].name} in {_name(target)}: a residual connection"
            else:
                self._follow(user, group, dim=dim, repeat=repeat)
        elif not _asks_rows(user):
            group.why = f"its channels go into {_name(target)}, which is not known"

    def _flat(self, node: fx.Node, user: fx.Node, group: ChannelGroup, *, dim: int, repeat: int, whole: bool) -> None:
        """Dimensions from the second on become one, in which the features of a channel follow one another."""
        shape = self._shapes[node]
        if not whole or dim != 1:
            group.why = f"its channels are mixed with other dimensions in {user.name}"
            return
        self._follow(user, group, dim=1, repeat=repeat * math.prod(shape[2:]))

    def _is_flat(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether rows stay and the rest becomes one dimension, whose size is found and not written down."""
        sizes: Sequence[Any] = user.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = sizes[0]
        return len(sizes) == 2 and bool(sizes[1] == -1) and self._shapes[user][:1] == self._shapes[node][:1]

    def _reduced(self, node: fx.Node, user: fx.Node, group: ChannelGroup, *, dim: int, repeat: int) -> None:
        given = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
        keeps = user.args[2] if len(user.args) > 2 else user.kwargs.get("keepdim", False)
        dims: Any = (given,) if isinstance(given, int) else given
        n = len(self._shapes[node])
        if not isinstance(dims, tuple | list) or not all(isinstance(one, int) for one in dims):
            group.why = f"its channels are added up in {_name(user.target)}"
            return
        over = {int(one) % n for one in dims}
        if dim in over:
            group.why = f"its channels are added up in {_name(user.target)}"
            return
        self._follow(user, group, dim=dim if keeps else dim - sum(one < dim for one in over), repeat=repeat)


def _has_hooks(module: nn.Module) -> bool:
    return has_forward_hooks(module) or has_backward_hooks(module)


def _around(node: fx.Node) -> set[str]:
    """The modules, by name, whose forward a node is a part of; a called module is around itself."""
    names = {str(name).partition("@")[0] for name in node.meta.get("nn_module_stack", ())}
    return names | {str(node.target)} if node.op == "call_module" else names


def _from_second(user: fx.Node) -> bool:
    start = user.args[1] if len(user.args) > 1 else user.kwargs.get("start_dim", 0)
    end = user.args[2] if len(user.args) > 2 else user.kwargs.get("end_dim", -1)
    return (start, end) == (1, -1)


def _asks_rows(user: fx.Node) -> bool:
    """Whether only the number of rows is asked for: `x.size(0)`, `x.shape[0]`, `len(x)`."""
    if user.target == "size":
        return bool(tuple(user.args[1:]) == (0,))
    if user.target is getattr:
        return str(user.args[1]) == "shape" and all(map(_takes_first, user.users))
    return bool(user.target in (len, "dim"))


def _takes_first(user: fx.Node) -> bool:
    index: Any = user.args[1] if len(user.args) > 1 else None
    return user.target is operator.getitem and isinstance(index, int) and index == 0


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
