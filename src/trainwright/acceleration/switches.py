"""Switch on compilation, memory layouts and data on the device for a run: none changes a result, all are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainwright.acceleration import layout
from trainwright.acceleration.device_dataset import place_data
from trainwright.core.torch_private import nll_total_weight
from trainwright.data.source import Source
from trainwright.update.losses import CountObserver, counted_outside_graphs
from trainwright.update.trainer_like import TrainerLike


def speed_up(trainer: TrainerLike, source: Source, val: Mapping[str, Source], *, undo: ExitStack) -> list[str]:
    """Switch on what `trainer.fast` asks for and what is faster by default, until `undo` is closed.

    Returns lines for the header.
    """
    fast, device = trainer.fast, trainer.device.type
    fused = dict.fromkeys(type(one).__name__ for one in trainer.optimizers.values() if one.defaults.get("fused"))
    switched = [f"fused {name}" for name in fused]
    if device == "cuda" or fast.channels_last is True:
        switched += _speed_up_convolutions(trainer, undo)
    if fast.compile is not None:
        switched.append(undo.enter_context(_compiled(trainer, source)))
    lines = [f"faster: {', '.join(switched)}"] if switched else []
    if device != "cpu" or fast.device_data is True:
        lines += place_data(trainer, source, val, undo=undo)
    return lines


def _speed_up_convolutions(trainer: TrainerLike, undo: ExitStack) -> list[str]:
    """Lay weights out channels-last, and have cuDNN choose its algorithms by timing; return the names of both."""
    switched = []
    if _wants_channels_last(trainer):
        undo.enter_context(layout.channels_last(trainer.model, trainer.optimizers.values()))
        switched.append("weights of convolutions channels-last")
    if trainer.fast.defaults and trainer.device.type == "cuda" and layout.may_time(trainer.model):
        undo.enter_context(layout.timed_by_cudnn(trainer.model, watches=trainer.fast.compile is None))
        switched.append("cuDNN chooses by timing")
    return switched


def acceleration_notes(trainer: TrainerLike) -> tuple[str, ...]:
    """Return a line on what was compiled so far, and one on how windows are split."""
    compiled, splits = trainer._record.path.compiled, trainer._record.path.splits
    lines = () if compiled is None else (f"compiled {compiled}",)
    return lines if splits is None or not splits.split else (*lines, splits.split)


def _wants_channels_last(trainer: TrainerLike) -> bool:
    """Return whether weights are laid out channels-last: on request, or where tensor cores compute convolutions."""
    wanted = trainer.fast.channels_last
    if wanted != "auto":
        return bool(wanted)
    halves = str(trainer.precision) in ("bf16", "fp16")
    return trainer.fast.defaults and trainer.device.type == "cuda" and halves and layout.is_convolutional(trainer.model)


@contextmanager
def _compiled(trainer: TrainerLike, source: Source) -> Iterator[str]:
    from trainwright.acceleration.compilation import check_apart, compiled, kept_in

    fast, tracker = trainer.fast, trainer._tracker
    directory: Any = getattr(trainer.checkpoint, "directory", None)
    check_apart(fast.cache, None if directory is None else Path(directory))
    is_short = _short(trainer, source)
    try:
        with (
            kept_in(fast.cache, saves=trainer.is_main),
            compiled(trainer.model, fast.regions, fast.options, is_short=is_short, looks_on=CountObserver) as record,
        ):
            trainer._record.path.compiled = record
            tracker.count_by_graph = counted_outside_graphs
            yield f"compiles {record.what}"
    finally:
        tracker.count_by_graph = nll_total_weight


def _short(trainer: TrainerLike, source: Source) -> Callable[[], bool]:
    """Return a test whether the current micro-batch has fewer rows than the others, as the last of an epoch may."""
    size, length = source.batch_size, source.length

    def is_short() -> bool:
        window = trainer._tracker.window
        if window is None or size is None or length == 1 or not window.begun:
            return False
        position = min(window.position + 1, len(window.rows) - 1)
        return 0 < window.rows[position] < size // trainer.world.size

    return is_short
