"""Looks on while a trainer makes a few updates: what goes from layer to layer, what is read, what gets a gradient."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.core.errors import is_ours, is_users
from trainwright.core.torch_private import version_of

READS = frozenset(
    {
        *("item", "tolist", "cpu", "numpy", "equal", "allclose", "is_nonzero"),
        *("__float__", "__int__", "__bool__", "__index__", "__complex__", "__array__", "__repr__", "__format__"),
    }
)
"""What brings a number to the host, wherever the tensor lies."""
_SIZES = frozenset({"nonzero", "argwhere", "masked_select", "unique"})
"""What has a size that the host must wait for, on an accelerator."""
_CONVOLUTIONS = frozenset({f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)})
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "lstm", "gru", "rnn_tanh", "rnn_relu"})
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
_SQUASHED = frozenset({"softmax", "log_softmax", "sigmoid"})
_SAME_VALUES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "contiguous"})
_LOSSES = frozenset({"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"})
_PICKS = frozenset({"__getitem__", "select", "narrow"})
"""What takes one row of a tensor; `_PARTS` take all of them apart."""
_PARTS = frozenset({"unbind", "split", "split_with_sizes", "chunk", "tensor_split"})
_WRAPPERS = ("/torch/overrides.py", "/torch/_tensor.py", "/torch/functional.py")
_BETWEEN_EPOCHS = frozenset({"begin_epoch", "end_epoch"})


@dataclass(slots=True)
class Read:
    """A line of the user's own code that brings numbers to the host."""

    file: str
    line: int
    name: str
    times: int = 0

    @property
    def place(self) -> str:
        """`file:line`, as errors tell it."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(slots=True)
class Entered:
    """The numbers that a layer got straight from the data, by its features or channels."""

    kind: str
    """The function: "linear", "conv2d" and so on."""
    count: int = 0
    """Numbers for each feature."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))
    largest: float = 0.0
    finite: bool = True


@dataclass(slots=True)
class Calls:
    """How often a layer was called each way."""

    on: int = 0
    """In train mode."""
    off: int = 0
    """In eval mode."""
    rows: int = 0
    """The most rows that it got."""
    tracks: bool = False
    """Whether it has running statistics that it would use in eval mode."""
    place: str = ""
    """The line of the user's own code."""
    module: nn.Module | None = None


@dataclass(slots=True)
class Recording:
    """What was seen of some updates, or of an evaluation."""

    named: dict[int, str] = field(default_factory=dict)
    """The name of each parameter and buffer of the model, by identity."""
    biased: Counter[str] = field(default_factory=Counter)
    """Layers with a trained bias, by how often they were called."""
    normalised: Counter[str] = field(default_factory=Counter)
    """How often what they gave went straight into a normalisation by the batch, and nowhere else."""
    norm_of: dict[str, str] = field(default_factory=dict)
    """Which normalisation that was."""
    stacked: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Linear layers whose output another one took, with nothing between them."""
    losses: dict[tuple[str, str], str] = field(default_factory=dict)
    """Losses by what they got, wrongly: ("cross_entropy", "softmax"), with the line that made it."""
    norms: dict[str, Calls] = field(default_factory=lambda: defaultdict(Calls))
    dropouts: dict[str, Calls] = field(default_factory=lambda: defaultdict(Calls))
    entered: dict[str, Entered] = field(default_factory=dict)
    reads: dict[tuple[str, int], Read] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    """The parameters that got a gradient, by identity."""
    constant: set[str] = field(default_factory=set)
    """Named losses without a gradient."""
    rows: int = 0
    """Of all micro-batches that were trained on."""
    row_loops: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The user's own lines that take rows one by one, with the rows that each took."""
    anomaly: str | None = None
    """Where torch's anomaly mode was on: the user's line, or "" where none is known. None where it was off."""


@dataclass(slots=True)
class _Mark:
    """A tensor that is followed to where it is used."""

    tensor: Tensor
    version: int
    layer: str
    kind: str
    place: str = ""
    takers: list[str] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Notes what torch is asked for inside, and changes nothing."""

    def __init__(self, model: nn.Module, rows: Collection[int] = ()) -> None:
        super().__init__()
        self.seen = Recording()
        self._rows = frozenset(rows)
        """The rows that batches have, where loops over them are looked for."""
        self._parts: dict[int, tuple[Tensor, tuple[str, int]]] = {}
        """Rows that a tensor was taken apart into, with the line that did it."""
        self._model = model
        self._modules = {id(module): name for name, module in model.named_modules()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.seen.named[id(tensor)] = name
        self._marks: dict[int, _Mark] = {}
        self._computed = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Carry the function out, and note what is told by its arguments and what it gives."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS or name in _SIZES or name in ("to", "__getitem__"):
            self._note_read(name, args, kwargs)
        note = self._look_for(name)
        if note is not None:
            note(func, args, kwargs)
        if self.seen.anomaly is None and torch.is_anomaly_enabled():
            self.seen.anomaly = self._place(sys._getframe(1))
        returned = func(*args, **kwargs)
        if self._rows and name != "__get__":
            self._note_rows(name, (*args, *kwargs.values()), returned)
        if name == "backward":
            self._settle()
        else:
            self._follow(name, list(_tensors((args, kwargs))), returned)
        return returned

    def _look_for(self, name: str) -> Callable[..., None] | None:
        if name in _LOSSES:
            return self._note_loss
        if name in ("batch_norm", "instance_norm"):
            return self._note_norm
        if name in _DROPOUTS or name == "scaled_dot_product_attention":
            return self._note_dropout
        return self._note_entry if name == "linear" or name in _CONVOLUTIONS or name in _PRODUCTS else None

    def _follow(self, name: str, given: list[Tensor], returned: Any) -> None:
        """Note what was computed from weights, and mark what is to be followed."""
        results = [one for one in _tensors(returned) if not isinstance(one, nn.Parameter)]
        if results:
            for tensor in given:
                mark = self._marks.get(id(tensor))
                if mark is not None and mark.tensor is tensor:
                    mark.takers.append(name)
        if any(map(self._is_computed, given)):
            for one in results:
                if not one.requires_grad:
                    self._computed[one] = True
        if len(results) == 1 and not results[0].is_inference():  # those know no versions
            self._mark(name, given, results[0])

    def _mark(self, name: str, given: list[Tensor], result: Tensor) -> None:
        if name in _SQUASHED:
            kind, layer, place = name, "", self._place(sys._getframe(1))
            self._marks[id(result)] = _Mark(result, version_of(result), layer, kind, place)
        elif name == "linear" or name in _CONVOLUTIONS:
            layer = self._layer_of(given)
            if layer:
                if any(one.requires_grad and one.ndim == 1 and id(one) in self.seen.named for one in given[2:]):
                    self.seen.biased[layer] += 1
                self._marks[id(result)] = _Mark(result, version_of(result), layer, name)
        elif name in _SAME_VALUES and given and (mark := self._marked(given[0])) and mark.kind in _SQUASHED:
            self._marks[id(result)] = _Mark(result, version_of(result), mark.layer, mark.kind, mark.place)

    def _marked(self, tensor: Any) -> _Mark | None:
        """What is known of a tensor, where nothing has been written into it since."""
        mark = self._marks.get(id(tensor))
        return mark if mark is not None and mark.tensor is tensor and mark.version == version_of(tensor) else None

    def _layer_of(self, given: list[Tensor]) -> str:
        """The layer whose weight is among these tensors; a model that is a lone layer is called "model"."""
        for tensor in given[1:]:
            name = self.seen.named.get(id(tensor), "")
            if name:
                return name.rpartition(".")[0] or "model"
        return ""

    def _is_computed(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or tensor in self._computed or id(tensor) in self.seen.named

    def _note_norm(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A normalisation by the batch: which way, of how many rows, and what goes into it."""
        if func is F.batch_norm:
            names = ("input", "running_mean", "running_var", "weight", "bias", "training")
        elif func is F.instance_norm:
            names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
        else:
            return
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        tensors = [one for one in (given.get("weight"), given.get("running_mean")) if one is not None]
        layer = self._layer_of([given["input"], *tensors]) or "a BatchNorm"
        by_batch = bool(given.get(names[-1], func is F.instance_norm))
        if func is F.batch_norm:
            self._count(
                self.seen.norms[layer], given["input"], on=by_batch, tracks=given.get("running_mean") is not None
            )
        mark = self._marked(given["input"])
        if by_batch and mark is not None and (mark.kind == "linear" or mark.kind in _CONVOLUTIONS):
            self.seen.norm_of[mark.layer] = layer

    def _count(self, calls: Calls, given: Tensor, *, on: bool, tracks: bool) -> None:
        calls.on += on
        calls.off += not on
        calls.rows = max(calls.rows, len(given) if given.ndim else 0)
        calls.tracks = tracks
        frame = sys._getframe(1)
        calls.module, calls.place = calls.module or self._module(frame), calls.place or self._place(frame)

    def _note_dropout(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if func is F.scaled_dot_product_attention:
            share, on = (*args[4:5], kwargs.get("dropout_p", 0.0))[0], True
        else:
            names = ("input", "p", "training")
            given = {"p": 0.5, "training": True} | dict(zip(names, args, strict=False)) | dict(kwargs)
            share, on = given["p"], bool(given["training"])
        if share:
            module = self._module(sys._getframe(1))
            place = self._place(sys._getframe(1))
            named = self._modules.get(id(module), "") if isinstance(module, nn.Module) else ""
            calls = self.seen.dropouts[named or place or str(getattr(func, "__name__", ""))]
            self._count(calls, args[0], on=on, tracks=True)

    def _note_loss(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name, output = func.__name__, args[0] if args else kwargs.get("input")
        mark = self._marked(output)
        squashed = mark is not None and mark.kind in _SQUASHED
        place = mark.place if mark is not None and squashed else self._place(sys._getframe(1))
        if name == "nll_loss" and isinstance(output, Tensor) and output.is_floating_point():
            if bool((output.detach() > 1e-6).any()):
                self.seen.losses[name, mark.kind if mark is not None and squashed else "values above 0"] = place
        elif mark is not None and (name, mark.kind) in (
            ("cross_entropy", "softmax"),
            ("cross_entropy", "sigmoid"),
            ("binary_cross_entropy_with_logits", "sigmoid"),
            ("binary_cross_entropy_with_logits", "softmax"),
        ):
            self.seen.losses[name, mark.kind] = place

    def _note_entry(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Numbers that a layer gets which no weight has touched, and what one linear layer gives the next."""
        name, given = func.__name__, list(_tensors((args, kwargs)))
        layer = self._layer_of(given)
        if not layer or not given:
            return
        mark = self._marked(given[0])
        if name == "linear" and mark is not None and mark.kind == "linear":
            self.seen.stacked[mark.layer, layer] += 1
        dense = given[0].layout is torch.strided and not given[0].is_nested
        if dense and given[0].is_floating_point() and given[0].ndim > 1 and not self._is_computed(given[0]):
            enter(self.seen.entered.setdefault(layer, Entered(name)), given[0].detach(), images=name in _CONVOLUTIONS)

    def _note_read(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A number of the step that the user's own line asks for."""
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor):
            return
        far = tensor.device.type not in ("cpu", "meta")
        if name == "to" and not _to_host(args, kwargs):
            return
        if name in _SIZES or name == "__getitem__":
            if not far or (name == "__getitem__" and not _by_mask(args[1:])):
                return
        elif not far and not self._is_computed(tensor):
            return
        frame = _asking(sys._getframe(2))
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
            self.seen.reads.setdefault((file, line), Read(file, line, name)).times += 1

    def _note_rows(self, name: str, given: tuple[Any, ...], returned: Any) -> None:
        """Count rows that a line takes one by one, by an index, or by a call for each row of a tensor taken apart.

        Rows taken apart for a single call, as `torch.stack(x.unbind(0))`, are no loop.
        """
        if self._parts:
            used = [self._parts.pop(id(one), None) for one in _tensors(given)]
            self.seen.row_loops.update({mark[1] for mark in used if mark is not None})
        of = given[0] if given else None
        if name not in _PICKS | _PARTS or not isinstance(of, Tensor) or not of.ndim or of.is_nested or of.is_sparse:
            return
        if len(of) not in self._rows or id(of) in self.seen.named:
            return
        frame = _asking(sys._getframe(2))
        if frame is None:
            return
        line = frame.f_code.co_filename, frame.f_lineno
        if name in _PICKS:
            self.seen.row_loops[line] += _is_one_row(name, given[1:], len(of))
        elif len(returned) == len(of) and sum(one.numel() for one in returned[:1]) == of[0].numel():
            self._parts.update({id(one): (one, line) for one in returned})

    def _settle(self) -> None:
        """After a backward: where the outputs of layers went, all of their users being known now."""
        for mark in self._marks.values():
            if mark.takers in (["batch_norm"], ["instance_norm"]) and mark.layer in self.seen.norm_of:
                self.seen.normalised[mark.layer] += 1
        self._marks.clear()
        self._parts.clear()

    def _module(self, frame: FrameType | None) -> nn.Module | None:
        """The innermost module that is being called, of the model or beside it."""
        while frame is not None and not is_ours_but_watch(frame):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return module
            frame = frame.f_back
        return None

    def _place(self, frame: FrameType | None) -> str:
        """The user's own line, or the module of torch's that is called by none."""
        start = frame
        while frame is not None and not is_ours_but_watch(frame):
            if is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        module = self._module(start)
        name = self._modules.get(id(module))
        return "" if module is None or name is None else f"{type(module).__name__} {name!r}"


def enter(entered: Entered, numbers: Tensor, *, images: bool) -> None:
    """Add numbers to those that a layer got: by channel (dim 1) for images, else by feature (the last)."""
    flat = numbers.movedim(1, -1) if images else numbers
    flat = flat.reshape(-1, flat.shape[-1]).double()
    entered.count += len(flat)
    entered.sums = entered.sums + flat.sum(0).cpu()
    entered.squares = entered.squares + flat.square().sum(0).cpu()
    entered.largest = max(entered.largest, float(flat.abs().max())) if flat.numel() else entered.largest
    entered.finite = entered.finite and bool(flat.isfinite().all())


@contextmanager
def noting_gradients(parameters: Mapping[str, nn.Parameter], reached: set[int]) -> Iterator[None]:
    """Note which parameters get a gradient inside."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda one: reached.add(id(one)))
        for parameter in parameters.values()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_ours_but_watch(frame: FrameType) -> bool:
    """Whether a frame is one of this package's, and not of this file."""
    return is_ours(frame.f_code.co_filename) and frame.f_code.co_filename != __file__


def _asking(frame: FrameType | None) -> FrameType | None:
    """The user's own frame that asks for a number in a step; None where torch, a package or this one asks."""
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return None
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_name in _BETWEEN_EPOCHS:
            return None
        outer = outer.f_back
    return frame


def _is_one_row(name: str, index: Sequence[Any], rows: int) -> bool:
    """Whether an index along dim 0 takes a single row."""
    if name != "__getitem__":  # select(dim, index), narrow(dim, start, length)
        return index[0] == 0 and (name == "select" or index[-1] == 1)
    first = index[0][0] if isinstance(index[0], tuple) and index[0] else index[0]
    if isinstance(first, slice):
        return len(range(*first.indices(rows))) == 1 if _is_plain(first) else False
    if isinstance(first, Tensor):
        return first.ndim == 0 and not first.is_floating_point() and first.dtype != torch.bool
    return isinstance(first, int | np.integer) and not isinstance(first, bool)


def _is_plain(index: slice) -> bool:
    return all(one is None or isinstance(one, int | np.integer) for one in (index.start, index.stop, index.step))


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in arguments, in order, down to lists in lists."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 4 and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth + 1)


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    asked = [one for one in (*args[1:], kwargs.get("device")) if isinstance(one, str | torch.device)]
    return any(torch.device(one).type == "cpu" for one in asked)


def _by_mask(index: tuple[Any, ...]) -> bool:
    return any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(index))
