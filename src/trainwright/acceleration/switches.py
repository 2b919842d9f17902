"""What a run switches to be faster: each stated in the header, changing no result, and undone at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.acceleration import layout
from trainwright.core.torch_private import nll_total_weight
from trainwright.data.source import Source
from trainwright.update.losses import CountObserver, counted_outside_graphs
from trainwright.update.owner import Owner


@dataclass(frozen=True, slots=True)
class Sped:
    """What was switched, and what is left to do when the run has been loaded."""

    notes: tuple[str, ...] = ()
    """Lines for the header."""
    loaded: Callable[[], None] = lambda: None
    """To be called when states were loaded: they may have been saved in another layout than weights have now."""


@contextmanager
def sped_up(owner: Owner, source: Source) -> Iterator[Sped]:
    """Compile and switch inside what `owner.fast` asks for, and what is faster by default; all undone afterwards."""
    fast, switched = owner.fast, _fused(owner)
    with ExitStack() as undo:
        if _lies_channels_last(owner):
            undo.enter_context(layout.channels_last(owner.model, owner.optimizers.values()))
            switched.append("weights of convolutions channels-last")
        if fast.defaults and owner.device.type == "cuda" and layout.may_time(owner.model):
            undo.enter_context(layout.timed_by_cudnn(owner.model, watches=fast.compile is None))
            switched.append("cuDNN chooses by timing")
        if fast.compile is not None:
            switched.append(undo.enter_context(_compiled(owner, source)))
        notes = (f"faster: {', '.join(switched)}",) if switched else ()
        yield Sped(notes, partial(layout.align_state, owner.optimizers.values()))


def _fused(owner: Owner) -> list[str]:
    """The optimizers that make their steps by torch's fused kernels."""
    fused = {
        name: None for one in owner.optimizers.values() if one.defaults.get("fused") for name in [type(one).__name__]
    }
    return [f"fused {name}" for name in fused]


def acceleration_notes(owner: Owner) -> tuple[str, ...]:
    """What was compiled so far, and how windows are split, as lines; none where nothing is."""
    compiled, splits = owner._record.compiled, owner._record.splits
    lines = () if compiled is None else (f"compiled {compiled}",)
    return lines if splits is None or not splits.split else (*lines, splits.split)


def _lies_channels_last(owner: Owner) -> bool:
    """Whether weights are laid channels-last: where it was asked for, or tensor cores compute convolutions."""
    wanted = owner.fast.channels_last
    if wanted != "auto":
        return bool(wanted)
    halves = str(owner.precision) in ("bf16", "fp16")
    return owner.fast.defaults and owner.device.type == "cuda" and halves and layout.is_convolutional(owner.model)


@contextmanager
def _compiled(owner: Owner, source: Source) -> Iterator[str]:
    from trainwright.acceleration.compilation import check_apart, compiled, kept_in

    fast, tracker = owner.fast, owner._tracker
    directory: Any = getattr(owner.checkpoint, "directory", None)
    check_apart(fast.cache, None if directory is None else Path(directory))
    is_short = _short(owner, source)
    try:
        with (
            kept_in(fast.cache, saves=owner.is_main),
            compiled(owner.model, fast.regions, fast.options, is_short=is_short, looks_on=CountObserver) as record,
        ):
            owner._record.compiled = record
            tracker.count_by_graph = counted_outside_graphs
            yield f"compiles {record.what}"
    finally:
        tracker.count_by_graph = nll_total_weight


def _short(owner: Owner, source: Source) -> Callable[[], bool]:
    """Tells whether the micro-batch in hand has fewer rows than the data's batches: it is the last of an epoch."""
    whole, length = source.batch_size, source.length

    def is_short() -> bool:
        window = owner._tracker.window
        if window is None or whole is None or length == 1 or not window.begun:
            return False
        position = min(window.position + 1, len(window.rows) - 1)
        return 0 < window.rows[position] < whole // owner.world.size

    return is_short
