"""Runs a copy of a model forward and backward, on the meta device where it can, and tells what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trainwright.core.device import change, devices_of, move
from trainwright.core.errors import SettingError, first_line
from trainwright.core.rng import rng_preserved
from trainwright.core.trees import tensors_in
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.flops import twin_on
from trainwright.modules.tensor_memory import Living

META = torch.device("meta")


@dataclass(frozen=True)
class PassMemory:
    """What one forward and its backward take."""

    kept: int
    """Bytes that the forward leaves for the backward, beside weights, buffers and inputs; an output counts where the
    backward reads it."""
    peak: int
    """The most bytes alive at once, gradients of weights among them."""
    flops: int
    """Floating-point operations of both, a multiplication with its addition being two."""


@dataclass(frozen=True)
class Given:
    """What a model is called with."""

    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None
    """Is given the model before them; None: the model is called."""

    def run(self, model: nn.Module) -> Any:
        """Call a model."""
        if self.call is not None:
            return self.call(model, *self.inputs, **self.keywords)
        return model(*self.inputs, **self.keywords)

    def on(self, device: torch.device) -> Given:
        """The same with its tensors on a device."""
        return Given(move(self.inputs, device), move(self.keywords, device), self.call)

    def beside(self, model: nn.Module) -> Given:
        """Copies of the same where a model has its first parameters."""
        place = next(iter(devices_of(model)), torch.device("cpu"))

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to(place, copy=True).requires_grad_(tensor.requires_grad)

        return Given(change(self.inputs, place, copied), change(self.keywords, place, copied), self.call)


@dataclass
class Dry:
    """A run of a copy, for whoever watches it."""

    twin: nn.Module
    living: Living | None
    """None where operations are counted."""
    counter: Any = None
    """Torch's `FlopCounterMode`; None where memory is followed."""
    output: Any = None

    @property
    def flops(self) -> int:
        """Operations so far."""
        return int(self.counter.get_total_flops())

    def let_go(self) -> Callable[[], None]:
        """Let go of the output; return the backward, which begins from ones."""
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
def dry(
    model: nn.Module,
    given: Given,
    on: torch.device | None,
    *,
    counts: bool = False,
    prepare: Callable[[Dry], None] = lambda _: None,
) -> Iterator[Dry]:
    """Run a copy of `model` forward on the device `on`, or with copies of its weights and inputs where it lies (None).

    Hooks are left out. Memory is followed; with `counts` operations are, for torch's counter holds on to tensors.
    `prepare` is given the copy before it runs. Inside, the output is there, and a backward can be run.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if is_sharded(*model.parameters()):
        what = "a model in shards cannot be copied"
        raise SettingError(what, fix="measure it before Trainer(parallel=FSDP(...)) is made")
    with rng_preserved(), torch.enable_grad(), nullcontext() if on is None else on:
        twin, there = twin_on(model, on), given.beside(model) if on is None else given.on(on)
        known = [*twin.parameters(), *twin.buffers(), *tensors_in((there.inputs, there.keywords))]
        counter: Any = FlopCounterMode(display=False) if counts else None
        run = Dry(twin, None if counts else Living(known), counter)
        prepare(run)
        watching: Any = run.living or counter
        with watching:
            run.output = there.run(twin)
            yield run


def somewhere(work: Callable[[torch.device | None], Any]) -> tuple[Any, str]:
    """What `work` gives on the meta device, else where the model lies; and why it did not run on the first."""
    try:
        return work(META), ""
    except SettingError:
        raise
    except Exception as error:  # the model's own, which may be any: it was not written for the meta device
        why = first_line(error, 120)
    return work(None), why


def measured(
    model: nn.Module, given: Given, *, on: torch.device | None, prepare: Callable[[Dry], None] = lambda _: None
) -> PassMemory:
    """Return what one forward and its backward take; `prepare` is given the copy before it runs."""
    with dry(model, given, on, prepare=prepare) as run:
        kept, peak = memory_of(run)
    with dry(model, given, on, counts=True, prepare=prepare) as run:
        run.let_go()()
        return PassMemory(kept, peak, run.flops)


def memory_of(run: Dry, look: Callable[[Living], None] = lambda _: None) -> tuple[int, int]:
    """Bytes that are kept for the backward, and the most at once until its end; `look` is called between the two."""
    backward, living = run.let_go(), run.living
    assert living is not None
    kept = living.now
    look(living)
    backward()
    return kept, living.peak
