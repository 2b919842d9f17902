"""`summary(model, batch)`: parameters, FLOPs and memory of each module, measured on a copy of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from trainwright.core.checks import check_choice
from trainwright.core.device import change, devices_of, move
from trainwright.core.errors import SettingError, first_line, message
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.core.trees import parameters_of, tensors_in
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.flops import twin_on
from trainwright.modules.peak_memory import LiveTensors
from trainwright.observers.table import aligned, amount, byte_size
from trainwright.update.batches import split

Call = Callable[[nn.Module, Any], Any]
"""A function `call(model, batch)`."""
_META = torch.device("meta")

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
"""Modules that look up weights and do not multiply them."""


@suggests
def summary(
    model: nn.Module, batch: Any, *, call: Call | None = None, on: Literal["meta", "device"] = "meta"
) -> Summary:
    """Return parameters, FLOPs and memory of each module of a model for one batch, forward and backward.

    The model is called like in the default steps of a trainer: with a tuple or mapping without its target. If `forward`
    does not accept that, it gets the complete batch. Model, modes, random state and batch do not change. Hooks do not
    run. Saved bytes are those of the kernels of the measured device; fused kernels of a GPU may save less. A model that
    does not run on the meta device (`.item()`, a device in its code), or is measured under autocast, runs on its own
    device, and `note` gives the reason.

    Args:
        model: The model.
        batch: One batch.
        call: A function `call(model, batch)` that replaces this call.
        on: "meta" runs a copy on torch's meta device, which has shapes and no values. "device" runs a copy on the
            model's device, under autocast too.

    Raises:
        TypeError: If `model` is not a module, or if `batch` holds no tensor.
        SettingError: If a parameter has no shape yet, or if the model cannot be called with the batch.
    """
    check_choice(on, "summary", "on", choices=("meta", "device"))
    if not isinstance(model, nn.Module):
        fix = "summary(trainer.model, batch)" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise TypeError(message(f"summary({type(model).__name__}, ...)", want="a torch.nn.Module", fix=fix))
    if call is None and next(tensors_in(batch), None) is None:
        is_loader = isinstance(batch, Iterable) and not isinstance(batch, tuple | list | Mapping)
        fix = "summary(model, next(iter(data)))" if is_loader else "summary(model, torch.randn(8, 3))"
        want = "one batch: a tensor, (inputs, target) or a mapping of tensors"
        raise TypeError(message(f"summary(model, {type(batch).__name__})", want=want, fix=fix))
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            what = f"summary: {name} has no shape yet"
            raise SettingError(what, fix="call model(one_batch) once before")
    forward = _ModelCall((batch,), call=call) if call is not None else _call_of(model, batch)
    note = 'on="device"' if on == "device" else _why_not_meta(model)
    if note:
        watch = _watched(model, forward, None)
    else:
        watch, note = _on_meta_or_here(lambda device: _watched(model, forward, device))
    flops, _ = _on_meta_or_here(lambda device: _counted(model, forward, device, watch=watch))
    return Summary(
        layers=tuple(watch.layer(index, name, one) for index, (name, one) in enumerate(model.named_modules())),
        total=PassMemory(watch.kept, watch.peak, flops),
        weights=_bytes(model.parameters()),
        buffers=_bytes(model.buffers()),
        note=note,
    )


@dataclass(frozen=True)
class PassMemory:
    """Memory and FLOPs of one forward and its backward."""

    kept: int
    """Bytes that the forward saves for the backward, without weights, buffers and inputs. An output counts if the
    backward reads it."""
    peak: int
    """Peak bytes, with the gradients of weights."""
    flops: int
    """FLOPs of forward and backward. A multiply-add counts as two."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The record of a module, with the modules inside it."""

    name: str
    """Its first name; "" for the model."""
    kind: str
    """Its class."""
    depth: int
    calls: int = 0
    """Number of calls of its forward; 0 if it was not called."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors returned by its first call."""
    parameters: int = 0
    """Number of parameter elements; shared ones count once."""
    trained: int = 0
    """Number of parameter elements that are not frozen."""
    buffers: int = 0
    """Number of buffer elements."""
    flops: int = 0
    """FLOPs of its forward: matrix products, convolutions, attention."""
    kept: int = 0
    """Bytes from its forward that are saved for the backward."""
    uncounted: bool = False
    """Whether it has matrices and unknown FLOPs: torch has no formula for its kernel."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of `summary`: parameters, FLOPs and memory of a model. `print` shows a table."""

    layers: tuple[Layer, ...]
    """The model, then the modules inside it, each once."""
    total: PassMemory
    """Memory and FLOPs of forward and backward together."""
    weights: int
    """Bytes of parameters."""
    buffers: int
    """Bytes of buffers."""
    note: str = ""
    """The reason for a run on the model's device; "" for the meta device."""

    def __getitem__(self, name: str) -> Layer:
        """Return the layer of this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def table(self, depth: int | None = None) -> str:
        """Return the table as text, with modules down to `depth`. The model has depth 0."""
        layers = [layer for layer in self.layers if depth is None or layer.depth <= depth]
        lines = aligned([_HEAD, *map(_row, layers)], left=2)
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *self._totals()])

    def __str__(self) -> str:
        """Return the complete table."""
        return self.table()

    def _totals(self) -> Iterator[str]:
        model, total = self.layers[0], self.total
        frozen = model.parameters - model.trained
        parts = [f"{model.parameters:,} parameters", *([f"{frozen:,} frozen"] if frozen else [])]
        yield ""
        yield " · ".join([*parts, f"{byte_size(self.weights)} of weights", f"{byte_size(self.buffers)} of buffers"])
        yield f"{amount(model.flops)} operations forward, {amount(total.flops)} with the backward"
        yield f"{byte_size(total.kept)} kept for the backward, {byte_size(total.peak)} at most, gradients included"
        unknown = [layer.name for layer in self.layers if layer.uncounted]
        if unknown:
            yield f"operations of {', '.join(unknown)} are not counted: torch has no formula for them"
        if self.note:
            yield f"measured on the model's own device: {self.note}"


_HEAD = ("module", "output", "parameters", "trained", "buffers", "operations", "kept")


def _row(layer: Layer) -> tuple[str, ...]:
    name = "  " * layer.depth + (f"{layer.name.rpartition('.')[2]} " if layer.name else "") + f"({layer.kind})"
    shapes = " ".join("x".join(map(str, shape)) or "1" for shape in layer.outputs) or "-"
    times = f" x {layer.calls} calls" if layer.calls > 1 else "" if layer.calls or layer.flops else " not called"
    numbers = (layer.parameters, layer.trained, layer.buffers)
    flops = "?" if layer.uncounted else amount(layer.flops)
    return (name, shapes + times, *(f"{one:,}" for one in numbers), flops, byte_size(layer.kept))


def _why_not_meta(model: nn.Module) -> str:
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    under = any(torch.is_autocast_enabled(kind) for kind in kinds if torch.amp.is_autocast_available(kind))
    return "meta has no autocast" if under else ""


def _watched(model: nn.Module, call: _ModelCall, on: torch.device | None) -> _LayerRecorder:
    """Run forward and backward, and record bytes by layer."""
    watch = _LayerRecorder(list(model.modules()))
    with _dry_run(model, call, on, prepare=watch.memory) as run:
        watch.kept, watch.peak = _kept_and_peak(run, watch.note)
    return watch


def _counted(model: nn.Module, call: _ModelCall, on: torch.device | None, *, watch: _LayerRecorder) -> int:
    """Count the FLOPs of each module's forward; return those of forward and backward together."""
    watch.flops.clear()
    with _dry_run(model, call, on, counts=True, prepare=watch.operations) as run:
        backward = run.release_output()
        watch.over = True  # a backward may recompute modules
        backward()
        return run.flops


@dataclass
class _LayerRecorder:
    """Records the running modules of a copy, by their position among all modules."""

    modules: list[nn.Module]
    running: list[int] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    flops: dict[int, int] = field(default_factory=dict)
    made: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Running modules -> saved bytes allocated by them."""
    kept: int = 0
    peak: int = 0
    over: bool = False
    """Whether the forward has ended."""

    def memory(self, run: _DryRun) -> None:
        """Register hooks that record calls, shapes and owners of memory."""
        self._follow(run, self._returned)
        assert run.living is not None
        run.living.maker = lambda: tuple(self.running)

    def note(self, living: LiveTensors) -> None:
        """Record the saved bytes at the end of the forward."""
        self.made, self.over = dict(living.by), True

    def operations(self, run: _DryRun) -> None:
        """Register hooks that record FLOPs. A call inside another call of the same module counts in the outer one."""
        began: list[int] = []

        def end(index: int, _: Any) -> None:
            made = run.flops - began.pop()
            if index not in self.running:
                self.flops[index] = self.flops.get(index, 0) + made

        self._follow(run, end, lambda: began.append(run.flops))

    def layer(self, index: int, name: str, module: nn.Module) -> Layer:
        """Return the record of a module. A module without a call has the sums of the modules inside it."""
        parameters, calls = parameters_of(module), self.calls.get(index, 0)
        tops = {self.modules.index(one) for one in self._called(module)}
        flops = sum(self.flops.get(one, 0) for one in tops)
        products = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        return Layer(
            name=name,
            kind=type(module).__name__,
            depth=name.count(".") + 1 if name else 0,
            calls=calls,
            outputs=self.shapes.get(index, ()),
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            buffers=sum(b.numel() for b in module.buffers()),
            flops=flops,
            kept=sum(size for running, size in self.made.items() if not tops.isdisjoint(running)),
            uncounted=bool(products) and calls > 0 and not flops and not isinstance(module, _LOOKED_UP),
        )

    def _called(self, module: nn.Module) -> list[nn.Module]:
        """Return the module if it was called, else the outermost called modules inside it."""
        if self.calls.get(self.modules.index(module)):
            return [module]
        return [inner for child in module.children() for inner in self._called(child)]

    def _follow(self, run: _DryRun, end: Callable[[int, Any], None], begin: Callable[[], None] = lambda: None) -> None:
        self.running.clear()
        self.over = False
        for index, module in enumerate(run.twin.modules()):

            def enter(*_: Any, index: int = index) -> None:
                if not self.over:
                    self.running.append(index)
                    begin()

            def leave(*given: Any, index: int = index) -> None:
                if not self.over:
                    self.running.pop()
                    end(index, given[-1])

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)

    def _returned(self, index: int, output: Any) -> None:
        self.calls[index] = self.calls.get(index, 0) + 1
        self.shapes.setdefault(index, tuple(tuple(one.shape) for one in tensors_in(output)))


@dataclass
class _DryRun:
    """A measured forward of a copy of the model."""

    twin: nn.Module
    living: LiveTensors | None
    """Counts bytes; None if FLOPs are counted."""
    counter: Any = None
    """torch's `FlopCounterMode`; None if bytes are counted."""
    output: Any = None

    @property
    def flops(self) -> int:
        """FLOPs so far."""
        return int(self.counter.get_total_flops())

    def release_output(self) -> Callable[[], None]:
        """Release the output; return a function for the backward, with gradients of ones."""
        roots = [tensor for tensor in tensors_in(self.output) if tensor.requires_grad]
        edges = [get_gradient_edge(root) for root in roots]
        like = [(root.shape, root.dtype, root.device) for root in roots]
        self.output = None

        def backward() -> None:
            seeds = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            if edges:
                torch.autograd.backward(edges, seeds)

        return backward


@contextmanager
def _dry_run(
    model: nn.Module,
    call: _ModelCall,
    on: torch.device | None,
    *,
    counts: bool = False,
    prepare: Callable[[_DryRun], None] = lambda _: None,
) -> Iterator[_DryRun]:
    """Run the forward of a copy of `model` with copied inputs, without hooks. Inside, the backward can be run.

    - `on`: the device; None for that of the model.
    - `counts`: count FLOPs instead of bytes, since torch's counter keeps tensors alive.
    - `prepare`: called before the forward.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if is_sharded(*model.parameters()):
        what = "a model in shards cannot be copied"
        raise SettingError(what, fix="measure it before Trainer(parallel=FSDP(...)) is made")
    with rng_preserved(), torch.enable_grad(), nullcontext() if on is None else on:
        twin, there = twin_on(model, on), call.copied_to(model) if on is None else call.on(on)
        known = [*twin.parameters(), *twin.buffers(), *tensors_in((there.inputs, there.keywords))]
        counter: Any = FlopCounterMode(display=False) if counts else None
        run = _DryRun(twin, None if counts else LiveTensors(known), counter)
        prepare(run)
        watching: Any = run.living or counter
        with watching:
            run.output = there.run(twin)
            yield run


def _on_meta_or_here(work: Callable[[torch.device | None], Any]) -> tuple[Any, str]:
    """Return (result of `work` on the meta device, ""), or (result on the model's device, why meta failed)."""
    try:
        return work(_META), ""
    except SettingError:
        raise
    except Exception as error:  # the model may raise anything on the meta device
        why = first_line(error, 120)
    return work(None), why


def _kept_and_peak(run: _DryRun, look: Callable[[LiveTensors], None]) -> tuple[int, int]:
    """Return (bytes saved for the backward, peak until its end). `look` is called after the forward."""
    backward, living = run.release_output(), run.living
    assert living is not None
    kept = living.now
    look(living)
    backward()
    return kept, living.peak


@dataclass(frozen=True)
class _ModelCall:
    """The arguments of a forward."""

    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None
    """A function that calls the model with these arguments; None calls the model."""

    def run(self, model: nn.Module) -> Any:
        """Call the model; return its output."""
        if self.call is not None:
            return self.call(model, *self.inputs, **self.keywords)
        return model(*self.inputs, **self.keywords)

    def on(self, device: torch.device) -> _ModelCall:
        """Return the call with its tensors on a device."""
        return _ModelCall(move(self.inputs, device), move(self.keywords, device), self.call)

    def copied_to(self, model: nn.Module) -> _ModelCall:
        """Return the call with copies of its tensors on the device of the model's first parameter."""
        place = next(iter(devices_of(model)), torch.device("cpu"))

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to(place, copy=True).requires_grad_(tensor.requires_grad)

        return _ModelCall(change(self.inputs, place, copied), change(self.keywords, place, copied), self.call)


def _call_of(model: nn.Module, batch: Any) -> _ModelCall:
    """Return the call with the inputs of a batch, or with the complete batch if the forward accepts only that."""
    inputs, _ = split(batch)
    items = batch if isinstance(batch, tuple | list | Mapping) else (batch,)
    for each in (inputs, items):
        call = _ModelCall((), dict(each)) if isinstance(each, Mapping) else _ModelCall(tuple(each))
        if _accepts(model, call):
            return call
    have = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__} of {len(items)}"
    raise SettingError(
        "summary: the model cannot be called with this batch",
        have=have,
        want=f"{type(model).__name__}.forward{inspect.signature(model.forward)}",
        fix='summary(model, batch, call=lambda model, batch: model(batch["image"]))',
    )


def _accepts(model: nn.Module, call: _ModelCall) -> bool:
    try:
        inspect.signature(model.forward).bind(*call.inputs, **call.keywords)
    except TypeError:
        return False
    return True


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
