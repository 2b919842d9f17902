"""Compiles regions of a model in place inside a context; records graphs, recompilations and graph breaks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.overrides
from torch import Tensor, nn

from trainwright.core.checks import name_of
from trainwright.core.errors import SettingError
from trainwright.core.torch_private import (
    compiled_target,
    dynamo_config,
    dynamo_errors,
    dynamo_utils,
    freezing_guards,
    function_mode,
    function_mode_popped,
    is_compiled,
    plain_call,
    set_compiled_call,
)
from trainwright.core.trees import tensors_in
from trainwright.modules.matching import outermost, repeated_blocks

LIMIT = 64
"""Maximum recompilations per function. torch's default of 8 suffices for eight blocks in one mode."""
STATIC = 3
"""Number of shapes, per mode, with a static graph each. Further shapes share one dynamic graph."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Compiled:
    """The compilations of one run."""

    what: str
    """The regions and the backend, as text."""
    graphs: int = 0
    again: Counter[str] = field(default_factory=Counter)
    """Recompilations, by reason."""
    seconds: float = 0.0
    breaks: Counter[str] = field(default_factory=Counter)
    """Graph breaks, by reason."""
    short: int = 0
    """Uncompiled calls, with fewer rows than the compiled shapes."""

    def __str__(self) -> str:
        """Return one line with the counts and the most frequent reasons."""
        parts = [f"{self.what}: {_many(self.graphs, 'graph')} in {self.seconds:.1f}s"]
        for counted, name in ((self.again, "compiled again"), (self.breaks, "graph breaks")):
            if counted:
                reasons = "; ".join(f"{reason} ({n})" for reason, n in counted.most_common(2))
                parts.append(f"{counted.total()} {name}: {reasons}")
        if self.short:
            parts.append(f"{_many(self.short, 'call')} with fewer rows not compiled")
        return ", ".join(parts)


@contextmanager
def compiled(
    model: nn.Module,
    regions: str | Sequence[type[nn.Module]],
    options: dict[str, Any],
    *,
    is_short: Callable[[], bool] = lambda: False,
    looks_on: type[Any] | None = None,
) -> Iterator[Compiled]:
    """Context in which regions of `model` are compiled. Restores all modules at the end, also after an error.

    - `regions`: "regional" (the repeated blocks of the model, or the model), "full", or module classes.
    - `options`: arguments of `torch.compile`.
    - `is_short`: returns whether the first call has fewer rows than later ones. Calls with fewer rows than earlier
      ones, such as the last batch of an epoch, run uncompiled.
    - `looks_on`: a class of torch function modes that observe calls, and count them in `seen`. Under such a mode,
      regions with observed calls run uncompiled; the others are compiled without the mode.

    SettingError if a module is compiled already, or if no module is of the classes.
    """
    _refuse_compiled(model)
    chosen = find_regions(model, regions)
    config = dynamo_config()
    record = Compiled(f"{_described(model, chosen)} by {_backend(options)}")
    log = _Log(record)
    with ExitStack() as undo:
        undo.enter_context(config.patch(recompile_limit=max(LIMIT, config.recompile_limit), **freezing_guards()))
        for module in chosen:
            undo.callback(_release, module)
            call = _Call(module, options, log, is_short=is_short, looks_on=looks_on)
            set_compiled_call(module, call)
        yield record


def find_regions(model: nn.Module, wanted: str | Sequence[type[nn.Module]]) -> list[nn.Module]:
    """Return the modules to compile, none inside another: of repeated classes, of given classes, or the model."""
    if wanted == "full":
        return [model]
    if isinstance(wanted, str):
        return repeated_blocks(model) or [model]
    found = outermost(model, tuple(wanted))
    if not found:
        names = ", ".join(one.__name__ for one in wanted)
        what = f"Fast(compile={{'regions': ...}}): {type(model).__name__} holds no {names}"
        raise SettingError(what, want="classes of modules in the model", fix='Fast(compile="full")')
    return found


class _Call:
    """Replaces the compiled call of a module; chooses a graph or the plain forward for each call."""

    def __init__(
        self,
        module: nn.Module,
        options: dict[str, Any],
        log: _Log,
        *,
        is_short: Callable[[], bool],
        looks_on: type[Any] | None,
    ) -> None:
        self._module, self._options, self._log = module, options, log
        self._plain = plain_call(module)
        self._is_short, self._looks_on = is_short, looks_on
        self._chooses = "dynamic" not in options
        """Whether the first shapes get static graphs; False if the user passes `dynamic`."""
        self._compiled = self._compile(**({"dynamic": False} if self._chooses else {}))
        self._free: Callable[..., Any] | None = None
        """The call with a dynamic graph."""
        self._modes: dict[tuple[bool, bool], _Mode] = {}
        self._shows: bool | None = None
        """Whether a mode of class `looks_on` observes a call inside; None if unknown."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside code compiled by the user
            return self._plain(*args, **kwargs)
        key, shapes = (self._module.training, torch.is_grad_enabled()), _shapes(args, kwargs)
        mode = self._modes.get(key)
        if mode is None:
            mode = self._modes[key] = _Mode()
        mode.calls += 1
        call = mode.known.get(shapes)
        if call is None:
            if self._leaves_out(mode, shapes):
                mode.short += 1
                self._log.record.short += 1
                return self._plain(*args, **kwargs)
            call = mode.known[shapes] = self._choose(mode)
            with warnings.catch_warnings():  # torch reads all attributes of the arguments, deprecated ones too
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                return self._run(call, args, kwargs)
        return self._run(call, args, kwargs)

    def _leaves_out(self, mode: _Mode, shapes: Shapes) -> bool:
        if self._options.get("dynamic"):
            return False  # one graph serves all sizes
        if not mode.known:
            return self._is_short()
        rare = mode.short < 4 or mode.short * 8 <= mode.calls
        return rare and any(_has_fewer_rows(shapes, known) for known in mode.known)

    def _choose(self, mode: _Mode) -> Callable[..., Any]:
        """Return the call for a new shape."""
        if not self._chooses or len(mode.known) < STATIC:
            return self._compiled
        if self._free is None:
            self._free = self._compile(dynamic=True)
        return self._free

    def _compile(self, **sizes: Any) -> Callable[..., Any]:
        target = compiled_target(self._module.forward, self._plain)
        call: Callable[..., Any] = torch.compile(target, **sizes, **self._options)
        return call

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        looks_on, log = self._looks_on, self._log
        mode = None if looks_on is None else function_mode()
        if looks_on is not None and mode is not None and isinstance(mode, looks_on):
            if self._shows is not False:  # the first time, and always if the mode observes a call
                before, output = mode.seen, self._plain(*args, **kwargs)
                self._shows = self._shows or mode.seen > before
                return output
            with function_mode_popped():
                return self._run(call, args, kwargs)
        failed: Exception | None = None
        before = log.graphs
        try:
            return call(*args, **kwargs)
        except log.traced_error as error:
            failed = error
        except log.compiler_error as error:
            error.add_note("trainwright: while Fast(compile=...) was compiling; fast=None runs the model as it is")
            raise
        finally:
            if log.graphs != before:
                log.note(log.graphs - before)
        # An error of user code during tracing: raise it as without a compiler.
        self._plain(*args, **kwargs)
        raise failed


@dataclass(slots=True)
class _Mode:
    """The calls of one region in one mode (training or not, with gradients or not)."""

    known: dict[Shapes, Callable[..., Any]] = field(default_factory=dict)
    calls: int = 0
    short: int = 0


class _Log:
    """Records compilations during calls of regions."""

    def __init__(self, record: Compiled) -> None:
        self.record, self._torch = record, dynamo_utils()
        self.traced_error, self.compiler_error = dynamo_errors()
        self._breaks = Counter(self._torch.counters["graph_break"])
        self._last = self._newest()

    @property
    def graphs(self) -> int:
        """The number of graphs that torch has compiled in this process."""
        made: int = self._torch.counters["stats"]["unique_graphs"]
        return made

    def note(self, made: int) -> None:
        """Record `made` new graphs with torch's compilation metrics."""
        record, breaks = self.record, Counter(self._torch.counters["graph_break"])
        record.graphs += made
        for reason, n in (breaks - self._breaks).items():
            record.breaks[_first_line(reason)] += n
        metrics = self._torch.get_compilation_metrics()  # of the last 64
        known = next((i for i, one in enumerate(metrics) if one is self._last), -1)
        for one in metrics[known + 1 :]:
            record.seconds += one.entire_frame_compile_time_s or 0.0
            if one.recompile_reason:
                record.again[_first_line(one.recompile_reason)] += 1
        self._breaks, self._last = breaks, self._newest()

    def _newest(self) -> Any:
        metrics = self._torch.get_compilation_metrics()
        return metrics[-1] if metrics else None


def _shapes(args: Any, kwargs: Any) -> Shapes:
    """Return the shapes of all tensors among the arguments, in order."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return (args[0].shape,)
    return tuple(tensor.shape for tensor in tensors_in((args, kwargs)))


def _has_fewer_rows(shapes: Shapes, known: Shapes) -> bool:
    """Return whether the shapes differ from known ones only by fewer rows."""
    if len(shapes) != len(known) or not shapes or not shapes[0] or not known[0]:
        return False
    rows, before = shapes[0][0], known[0][0]
    pairs = zip(shapes, known, strict=True)
    return rows < before and all(s == k or (s[:1] == (rows,) and k == (before, *s[1:])) for s, k in pairs)


def _refuse_compiled(model: nn.Module) -> None:
    names = [name or type(model).__name__ for name, one in model.named_modules() if is_compiled(one)]
    wrapped = type(model).__name__ == "OptimizedModule"
    if names or wrapped:
        what = "Fast(compile=...), and the model is compiled already"
        have = "torch.compile(model)" if wrapped else f"{names[0]}.compile()"
        raise SettingError(what, have=have, want="one of the two", fix="the model as it is, or fast=None")


def _release(module: nn.Module) -> None:
    vars(module).pop("_compiled_call_impl", None)


def _described(model: nn.Module, chosen: list[nn.Module]) -> str:
    if chosen == [model]:
        return type(model).__name__
    counted = Counter(type(module).__name__ for module in chosen)
    return " and ".join(f"{n} {name}" for name, n in counted.items())


def _backend(options: dict[str, Any]) -> str:
    backend = options.get("backend", "inductor")
    return backend if isinstance(backend, str) else name_of(backend)


def _first_line(reason: str) -> str:
    """Return a reason without graph number, line of code and stack."""
    line = reason.split("\n", 1)[0].split("  #", 1)[0].strip()
    return line.split(": ", 1)[1] if line.split(": ", 1)[0].replace("/", "").isdigit() else line


def _many(n: int, name: str) -> str:
    return f"{n} {name}" if n == 1 else f"{n} {name}s"
