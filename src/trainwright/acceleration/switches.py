"""Enables compilation, memory layouts and device data for a run, and describes the path of its updates.

Results differ at most by the order of floating-point additions. All switches are undone at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.acceleration.device_dataset import place_data
from trainwright.core.torch_private import nll_total_weight
from trainwright.data.source import Source
from trainwright.update import deferred_check
from trainwright.update.losses import CountObserver, counted_outside_graphs
from trainwright.update.trainer_like import TrainerLike


def speed_up(trainer: TrainerLike, source: Source, val: Mapping[str, Source], *, undo: ExitStack) -> list[str]:
    """Apply the settings of `trainer.fast` and the defaults until `undo` is closed; return header lines."""
    fast, device = trainer.fast, trainer.device.type
    fused = dict.fromkeys(type(one).__name__ for one in trainer.optimizers.values() if one.defaults.get("fused"))
    switched = [f"fused {name}" for name in fused]
    if device == "cuda" or fast.channels_last is True:
        switched += _speed_up_convolutions(trainer, undo)
    if fast.compile is not None:
        switched.append(undo.enter_context(_compiled(trainer, source)))
    lines = [f"fast path: {', '.join(switched)}"] if switched else []
    if device != "cpu" or fast.device_data is True:
        lines += place_data(trainer, source, val, undo=undo)
    return lines


def _speed_up_convolutions(trainer: TrainerLike, undo: ExitStack) -> list[str]:
    """Apply the channels-last layout and cuDNN benchmark mode if they are due; return their names."""
    switched = []
    if wants_channels_last(trainer):
        undo.enter_context(channels_last(trainer.model, trainer.optimizers.values()))
        switched.append("weights of convolutions channels-last")
    if trainer.fast.defaults and trainer.device.type == "cuda" and may_time(trainer.model):
        undo.enter_context(timed_by_cudnn(trainer.model, watches=trainer.fast.compile is None))
        switched.append("cuDNN chooses by timing")
    return switched


def acceleration_notes(trainer: TrainerLike) -> tuple[str, ...]:
    """Return a line on compiled regions, and one on split windows; none if there are none."""
    compiled, splits = trainer._record.path.compiled, trainer._record.path.splits
    lines = () if compiled is None else (f"compiled {compiled}",)
    return lines if splits is None or not splits.split else (*lines, splits.split)


def fast_path(trainer: TrainerLike) -> str:
    """Return text on the path of the updates: deferred checks (L1) or immediate checks (L0), with the reason."""
    why = trainer._record.path.why_immediate
    if why is None:  # no schedule is bound before the first run
        scaler = None if trainer.precision is None else trainer.precision.loss_scale(trainer.device.type)
        checks = trainer.on_nonfinite != "ignore" or scaler is not None
        why = deferred_check.why_immediate(trainer, checks=checks, scaler=scaler, schedules=None)
    reads = "one read per update, of loss, flag and norm together: " + "; ".join(why)
    if not why:
        reads = f"nothing is read before its time, which is up to {deferred_check.AHEAD} updates later"
    elif trainer.device.type not in deferred_check.ASYNC_DEVICES:
        reads = "its numbers are read at once, which waits for nothing"
    compiled = trainer._record.path.compiled
    how = "eager" if compiled is None else f"compiled ({compiled})"
    beside = "" if trainer._record.path.splits is None else f"; {trainer._record.path.splits}"
    return f"{'L0' if why else 'L1'}, {how} on {trainer.device.type}: {reads}{beside}{_gradients_averaged(trainer)}"


def _gradients_averaged(trainer: TrainerLike) -> str:
    """Return text on the averaging of gradients over ranks; "" for one rank."""
    from trainwright.distributed.ddp import DDP  # rarely needed

    size, hooks, settings = trainer.world.size, trainer._hooks, trainer.parallel
    if size == 1:
        return ""
    beside = " and one small sum more"
    if settings.shards:
        return f"; gradients of {size} processes are reduced to shards during backward{beside}"
    if hooks.has_custom_update or hooks.overrides_compute_gradients:
        return f"; gradients of {size} processes are averaged after backward: an `update` of your own reads them"
    compresses = isinstance(settings, DDP) and settings.compress is not None
    return f"; gradients of {size} processes are averaged during backward{beside if compresses else ''}"


def wants_channels_last(trainer: TrainerLike) -> bool:
    """Return whether to use channels-last: on request, or by "auto" if tensor cores compute convolutions."""
    wanted = trainer.fast.channels_last
    if wanted != "auto":
        return bool(wanted)
    halves = str(trainer.precision) in ("bf16", "fp16")
    return trainer.fast.defaults and trainer.device.type == "cuda" and halves and is_convolutional(trainer.model)


@contextmanager
def _compiled(trainer: TrainerLike, source: Source) -> Iterator[str]:
    from trainwright.acceleration.compilation import compiled

    fast, tracker = trainer.fast, trainer._tracker
    is_short = _short(trainer, source)
    try:
        with compiled(trainer.model, fast.regions, fast.options, is_short=is_short, looks_on=CountObserver) as record:
            trainer._record.path.compiled = record
            tracker.count_by_graph = counted_outside_graphs
            yield f"compiles {record.what}"
    finally:
        tracker.count_by_graph = nll_total_weight


def _short(trainer: TrainerLike, source: Source) -> Callable[[], bool]:
    """Return a function that returns whether the current micro-batch has fewer rows than others."""
    size, length = source.batch_size, source.length

    def is_short() -> bool:
        window = trainer._tracker.window
        if window is None or size is None or length == 1 or not window.begun:
            return False
        position = min(window.position + 1, len(window.rows) - 1)
        return 0 < window.rows[position] < size // trainer.world.size

    return is_short


# Convolutions: the layout of their weights, and cuDNN benchmark mode.

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_OTHERS = (nn.Linear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv3d)


def is_convolutional(model: nn.Module) -> bool:
    """Return whether most layers with weights are convolutions over images."""
    convolutional = [isinstance(module, _CONVOLUTIONS) for module in model.modules() if isinstance(module, _LAYERS)]
    return sum(convolutional) * 2 > len(convolutional)


@contextmanager
def channels_last(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Context in which weights with four dimensions are channels-last; contiguous afterwards. No value changes.

    Gradients and optimizer state get the layout of their weights: fused kernels require equal layouts.
    """
    # Weights that share memory are left out: they would get separate memory.
    laid = [p for p in model.parameters() if p.dim() == 4 and type(p) is nn.Parameter and _is_alone(p)]
    laid = [p for p in laid if not p.is_contiguous(memory_format=torch.channels_last)]
    optimizers = list(optimizers)
    try:
        for parameter in laid:
            _lay(parameter, torch.channels_last)
        align_state(optimizers)
        yield
    finally:
        for parameter in laid:
            _lay(parameter, torch.contiguous_format)
        align_state(optimizers)


def align_state(optimizers: Iterable[Optimizer]) -> None:
    """Change optimizer state to the layout of its weight, for weights with four dimensions and state of equal shape."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items() if parameter.dim() == 4 else ():
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _is_alone(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def _lay(parameter: nn.Parameter, layout: torch.memory_format) -> None:
    parameter.data = parameter.data.contiguous(memory_format=layout)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.contiguous(memory_format=layout)


_LAYERS = (*_CONVOLUTIONS, *_OTHERS)

SHAPES = 8
"""Maximum number of input shapes of the first convolution for which benchmark mode pays: each one is timed."""


def may_time(model: nn.Module) -> bool:
    """Return whether the model has a convolution, and deterministic algorithms are off."""
    cudnn = torch.backends.cudnn
    strict = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return not cudnn.benchmark and not strict and _first_convolution(model) is not None


@contextmanager
def timed_by_cudnn(model: nn.Module, *, watches: bool = True) -> Iterator[None]:
    """Context with `torch.backends.cudnn.benchmark = True`.

    `watches`: turn it off after more than `SHAPES` input shapes.
    """
    first, seen = _first_convolution(model), set[tuple[Any, ...]]()
    assert first is not None
    before = torch.backends.cudnn.benchmark

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen.add((module.training, *inputs[0].shape))
        if len(seen) > SHAPES:
            torch.backends.cudnn.benchmark = before

    handle = first.register_forward_pre_hook(look) if watches else None
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        torch.backends.cudnn.benchmark = before


def _first_convolution(model: nn.Module) -> nn.Module | None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return next((module for module in model.modules() if isinstance(module, kinds)), None)
