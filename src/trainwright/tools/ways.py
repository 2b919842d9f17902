"""The techniques that `advise` tries on an update: how each is switched on, and where it cannot be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.acceleration.compilation import find_regions
from trainwright.core.errors import TrainwrightError
from trainwright.core.trees import parameters_in
from trainwright.data.sources import open_source
from trainwright.tools.batching import halved, joined
from trainwright.tools.measuring import Way
from trainwright.trainer import Trainer

COMPILING = 40.0
"""Seconds that compiling may take before updates are as fast as they will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One thing to try."""

    name: str
    how: str
    """What to write to switch it on."""
    way: Way | None = None
    """How its updates are made; None where it is not tried."""
    why_not: str = ""
    """Why it is not tried."""
    against: str = "ready"
    """What it is compared with: updates of "ready" batches, or those of the user's own "loader"."""
    start: float = 0.0
    """Seconds that its first updates may take; above 0 one block has to do for all turns."""
    for_memory: bool = False
    """Whether it is meant to save memory rather than time."""
    same_numbers: bool = True
    """Whether the loss is to be what it is without, up to rounding."""


def techniques(trainer: Trainer[Any], ready: list[Any]) -> list[Technique]:
    """Everything that may be switched for an update of these ready batches."""
    source = open_source(ready)
    made = (_precisions, _optimizers, _compile, _layouts, _for_cuda, _memory, _batches)
    found = [technique for make in made for technique in make(trainer, ready)]
    return [bound(technique, source) for technique in found]


def as_it_is(data: Any) -> Way:
    """The updates that techniques are compared with."""
    return Way(name="as it is", data=data)


def bound(technique: Technique, source: Any = None) -> Technique:
    """The technique on these batches where it has none of its own."""
    if technique.way is None:
        return technique
    return replace(technique, way=replace(technique.way, data=technique.way.data or source))


def _precisions(trainer: Trainer[Any], _: list[Any]) -> Iterator[Technique]:
    for kind in ("bf16", "fp16", "tf32"):
        how, why_not = f'Trainer(..., precision="{kind}")', ""
        if str(trainer.precision) == kind:
            why_not = "it is on"
        elif kind != "bf16" and trainer.device.type != "cuda":
            why_not = "it needs a CUDA device"
        elif any(p.dtype in (torch.float16, torch.bfloat16) for p in trainer.model.parameters()):
            why_not = "the weights are of reduced precision themselves"
        way = None if why_not else Way(name=kind, settings={"precision": kind})
        yield Technique(name=kind, how=how, way=way, why_not=why_not)


def _optimizers(trainer: Trainer[Any], _: list[Any]) -> Iterator[Technique]:
    for kind in ("fused", "foreach"):
        names, why_not = sorted({type(one).__name__ for one in trainer.optimizers.values()}), ""
        of_torch = [name for name in names if hasattr(torch.optim, name)]
        how = f"torch.optim.{[*of_torch, 'AdamW'][0]}(..., {kind}=True)"
        if not all(_takes(one, kind) for one in trainer.optimizers.values()):
            why_not = f"{' and '.join(names)} of this kind cannot be {kind}"
        elif all(group.get(kind) for one in trainer.optimizers.values() for group in one.param_groups):
            why_not = "it is on"
        elif kind == "foreach" and all(one.defaults.get("fused") for one in trainer.optimizers.values()):
            why_not = "the optimizer is fused, which is more"
        way = None if why_not else Way(name=kind, around=partial(_rebuilt, kind=kind))
        yield Technique(name=f"{kind} optimizer", how=how, way=way, why_not=why_not)


def _takes(optimizer: Optimizer, kind: str) -> bool:
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"] or kind not in optimizer.defaults:
        return False
    halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters_in(optimizer))
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return kind != "fused" or not (halves and momentum)


@contextmanager
def _rebuilt(trainer: Trainer[Any], *, kind: str) -> Iterator[None]:
    """Optimizers of the same class, settings and parameters in the place of the trainer's, built otherwise."""
    own = dict(trainer.optimizers)
    other = {"fused": "foreach", "foreach": "fused"}[kind]
    try:
        for name, optimizer in own.items():
            groups = [{**group, kind: True, other: None} for group in optimizer.param_groups]
            rebuilt: Any = type(optimizer)
            trainer.optimizers[name] = rebuilt(groups)
        yield
    finally:
        trainer.optimizers.update(own)


def _compile(trainer: Trainer[Any], _: list[Any]) -> Iterator[Technique]:
    how = 'Trainer(..., fast=Fast(compile="regional"))'
    why_not = "" if trainer.fast.compile is None else "it is on"
    way = None if why_not else Way(name="compile", settings={"fast": replace(trainer.fast, compile="regional")})
    yield Technique(name="compile", how=how, way=way, why_not=why_not, start=COMPILING)


def _layouts(trainer: Trainer[Any], _: list[Any]) -> Iterator[Technique]:
    how, why_not = "Trainer(..., fast=Fast(channels_last=True))", ""
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in trainer.model.modules()):
        why_not = "the model has no convolution over images"
    elif trainer.fast.channels_last is True:
        why_not = "it is on"
    way = None if why_not else Way(name="layout", settings={"fast": replace(trainer.fast, channels_last=True)})
    yield Technique(name="channels-last", how=how, way=way, why_not=why_not)


def _for_cuda(trainer: Trainer[Any], _: list[Any]) -> Iterator[Technique]:
    """What only a CUDA device has."""
    why_not = "" if trainer.device.type == "cuda" else "it needs a CUDA device"
    how = "torch.backends.cudnn.benchmark = True"
    if why_not or torch.backends.cudnn.benchmark or trainer.fast.defaults:
        yield Technique(name="cudnn.benchmark", how=how, why_not=why_not or "it is on")
    else:
        yield Technique(name="cudnn.benchmark", how=how, way=Way(name="cudnn", around=_timed_by_cudnn))


@contextmanager
def _timed_by_cudnn(_: Trainer[Any]) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _memory(trainer: Trainer[Any], ready: list[Any]) -> Iterator[Technique]:
    how = "Trainer(..., accumulate={0})  # with batches of half the rows"
    (_, now), *later = trainer.accumulate
    if later:
        yield Technique(name="accumulate", how=how.format(2), why_not="accumulate changes from epoch to epoch")
    else:
        every = 2 * now
        yield _of_cut(
            Technique(name=f"accumulate={every}", how=how.format(every), for_memory=True),
            lambda: halved(ready),
            {"accumulate": every},
        )
    yield _checkpointed(trainer)


def _checkpointed(trainer: Trainer[Any]) -> Technique:
    from trainwright.modules.activations import checkpoint_activations, is_recomputed

    blocks = find_regions(trainer.model, "regional")
    name, how = "activation checkpointing", "checkpoint_activations(model, blocks={{{0}}})"
    on = any(map(is_recomputed, trainer.model.modules()))
    if on or blocks == [trainer.model]:
        why_not = "it is on" if on else "the model repeats no block of layers"
        return Technique(name=name, how=how.format("Block"), why_not=why_not)
    kinds = {type(block) for block in blocks}
    around: Any = lambda trainer: checkpoint_activations(trainer.model, blocks=kinds)  # noqa: E731
    how = how.format(", ".join(sorted(kind.__name__ for kind in kinds)))
    return Technique(name=name, how=how, way=Way(name="checkpoint", around=around), for_memory=True)


def _batches(trainer: Trainer[Any], ready: list[Any]) -> Iterator[Technique]:
    how = "batches of twice the rows, and every lr times 2 (SGD) or 1.41 (Adam)"
    technique = Technique(name="batch size x2", how=how, same_numbers=False)
    yield _of_cut(technique, lambda: [joined(ready[i : i + 2]) for i in range(0, len(ready) - 1, 2)], {})


def _of_cut(technique: Technique, make: Callable[[], list[Any]], settings: dict[str, Any]) -> Technique:
    """The technique with batches made out of the ready ones, or why there are none."""
    try:
        made = make()
    except TrainwrightError as error:
        return replace(technique, why_not=str(error).splitlines()[0])
    if not made:
        return replace(technique, why_not="it takes two batches")
    return replace(technique, way=Way(name=technique.name, settings=settings, data=open_source(made)))
