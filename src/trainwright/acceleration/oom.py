"""Repeats a window in smaller micro-batches when memory runs out: the same rows, and thus the same update.

Before the repetition, all that the failed attempt may have changed is restored: random states, buffers,
`trainer.state`, gradients, logged numbers. After the start of an optimizer step a window is not repeated, since weights
may have changed.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.core.device import is_out_of_memory, release_memory
from trainwright.core.errors import DataError, SettingError, first_line, listed
from trainwright.core.rng import have_moved, random_state, set_random_state
from trainwright.core.torch_private import version_of
from trainwright.core.trees import leaves_of, parameters_of, tensors_in
from trainwright.data.sharding import slice_rows, sliceable_rows
from trainwright.distributed.mesh import Shard
from trainwright.modules.freezing import layers_mixing_rows
from trainwright.modules.modes import evaluating
from trainwright.update.snapshot import Buffers, LossTotals, RngStates, Snapshot, UserState
from trainwright.update.trainer_like import free_transfer_memory, networks_of
from trainwright.update.window import Window, weighted_value

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.trainer_like import TrainerLike


class SplitSummary(NamedTuple):
    """The splits of a finished run."""

    split: str

    def __str__(self) -> str:
        return self.split or "windows are run in parts where memory runs out"


class WindowSplitter:
    """Makes updates with the trainer's `update`, in smaller micro-batches after memory has run out.

    The limit is a number of elements, not of rows: batches with longer rows are cut into more parts.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._trainer = run, run.trainer
        trainer = run.trainer
        self._random = RngStates()
        buffers = Buffers(lambda: networks_of(trainer))
        self._snapshot = Snapshot(LossTotals(trainer._tracker), UserState(trainer), buffers, self._random)
        """All that a window changes before its step. Random states are last: the other parts could draw."""
        self._weights = _WeightMarks(run)
        self._epoch = -1
        self._is_checked = False
        """Whether parts of a batch were compared with the complete batch, or cannot be compared."""
        self._unknown = ""
        """Why parts and batch cannot be compared."""
        self._news: list[str] = []
        self.limit: float | None = None
        """Maximum elements of a micro-batch; None before memory has run out."""
        self.split = ""
        """One line on the splits; empty if there are none."""
        if run.trainer._hooks.begin_epoch is None:  # `begin_epoch` may freeze layers
            check_layers(run.trainer)

    def __str__(self) -> str:
        return str(SplitSummary(self.split))

    def take_news(self) -> list[str]:
        """Return lines on the splits since the last call."""
        news, self._news = self._news, []
        return news

    def summary(self) -> SplitSummary:
        """Return the summary after the run, without references to tensors."""
        return SplitSummary(self.split)

    def update(self, window: Window) -> Any:
        """Make the update of a window, with micro-batches that fit in memory."""
        if self._run.counters.epoch != self._epoch:
            self._epoch = self._run.counters.epoch
            check_layers(self._trainer)
            self._snapshot.refresh()
            self._weights.refresh()
        self._snapshot.capture()
        self._weights.capture()
        tried, failed = self._cut(window), None
        while True:
            self._trainer._tracker.window = tried
            try:
                returned = self._trainer.update(tried)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                why = self._why_not(tried)
                if why:
                    raise _noted(error, why)  # noqa: B904 - the error itself
                failed = error
            traceback.clear_frames(failed.__traceback__)  # the frames refer to activations
            tried = self._finer(window, tried, failed)
        if failed is not None:
            self._report(window, tried)
        return returned

    def _finer(self, window: Window, tried: Window, failed: BaseException) -> Window:
        """Restore the state before a failed attempt; return the window in smaller micro-batches."""
        hooks, index = self._trainer._hooks, self._largest(tried)
        assert index is not None
        window.release()
        tried.release()
        self._rewind(window)
        release_memory(self._trainer.device, lambda: free_transfer_memory(hooks))
        if self._weights.changed:
            raise _noted(failed, "weights were changed before memory ran out")
        self.limit = _size(tried.batches[index]) / 2
        finer = self._cut(window)
        if not self._is_checked:
            self._check(tried, index, failed, most=max(finer.rows))
            self._rewind(window)
        return finer

    def _rewind(self, window: Window) -> None:
        """Restore the state at the start of the window, and drop its results."""
        self._run.strategy.discard()
        self._run.tracker.begin(window)
        self._snapshot.restore()  # after `begin`, which clears the numbers of the update

    def _check(self, tried: Window, index: int, failed: BaseException, *, most: int) -> None:
        """Raise if the loss of a few rows of a micro-batch differs from that of their parts."""
        few = min(tried.rows[index], FEW, max(2, most))
        cuts = [range(few)], [range(few * 3 // 8 or 1), range(few * 3 // 8 or 1, few)]
        complete, parts = ([_part(tried, index, one) for one in each] for each in cuts)
        found = compare_parts(self._run, self._made(tried, complete), self._made(tried, parts))
        if found.refused:
            raise _noted(failed, found.refused)
        self._is_checked, self._unknown = not found.again, found.unknown

    def _cut(self, window: Window) -> Window:
        """Return the window in micro-batches of at most `limit` elements; the window itself if none is larger."""
        if self.limit is None:
            return window
        parts: list[tuple[Any, int]] = []
        for index, (batch, rows) in enumerate(zip(window.batches, window.rows, strict=True)):
            n = self._pieces(batch, rows)
            parts += [(batch, rows)] if n < 2 else [_part(window, index, Shard(i, n).of(rows)) for i in range(n)]
        return window if len(parts) == len(window.batches) else self._made(window, parts)

    def _pieces(self, batch: Any, rows: int) -> int:
        """Return the number of parts to cut a micro-batch into."""
        n = 1 if self.limit is None else min(rows, math.ceil(_size(batch) / self.limit))
        return 1 if n < 2 or _why_uncut(batch, rows) else n

    def _made(self, window: Window, parts: Sequence[tuple[Any, int]]) -> Window:
        hooks = self._trainer._hooks
        batches = [batch for batch, _ in parts]
        counted = hooks.count if len(parts) > 1 or hooks.overrides_count else None
        counts = None if counted is None else [counted(batch) for batch in batches]
        return Window(batches, [rows for _, rows in parts], counts, move=window.mover)

    def _largest(self, tried: Window) -> int | None:
        """Return the index of the largest micro-batch that can be cut; None if none can."""
        each = zip(tried.batches, tried.rows, strict=True)
        sizes = {i: _size(batch) for i, (batch, n) in enumerate(each) if n > 1 and not _why_uncut(batch, n)}
        return max(sizes, key=lambda i: sizes[i]) if sizes else None

    def _why_not(self, tried: Window) -> str:
        """Return why a window cannot be repeated in smaller micro-batches; "" if it can."""
        status = self._run.strategy.status
        if status.applied is True:
            return "a step had begun, and weights may be half-way"
        layers = layers_mixing_rows(self._trainer.model, self._trainer.loss)
        if layers:
            return f"{', '.join(layers)} takes a mean over its micro-batch"
        if self._largest(tried) is None:
            each = zip(tried.batches, tried.rows, strict=True)
            reason = next((why for batch, n in each if n > 1 and (why := _why_uncut(batch, n))), "")
            return reason or "each micro-batch is one row already"
        return ""

    def _report(self, window: Window, finer: Window) -> None:
        """Record the split for reports, and whether noise such as dropout then differs."""
        counters, k = self._run.counters, len(finer.batches)
        each = zip(window.batches, window.rows, strict=True)
        before, after = max((rows, math.ceil(rows / n)) for batch, rows in each if (n := self._pieces(batch, rows)) > 1)
        update = counters.earlier_updates + counters.updates + 1
        split = f"out of memory in update {update}: micro-batches of {before} rows are run in parts of up to {after}"
        if self._random.changed:
            split += ", and noise such as dropout is drawn for each part"
        if self._unknown:
            split += f"; that parts give the loss of the complete batch is not checked: {self._unknown}"
        cure = f"batches of {after} rows" if len(window.batches) == 1 else "smaller batches"
        self.split = f"{split}; {cure} with accumulate={k} do so from the start"
        self._news.append(self.split)


class _WeightMarks:
    """Detects writes to weights by a step. A window that has changed weights cannot be repeated."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._weights: list[Tensor] = []

    def refresh(self) -> None:
        """Find the weights again after `begin_epoch`, which may change layers."""
        weights = [p for root in networks_of(self._run.trainer) for p in parameters_of(root)]
        self._weights = list({id(p): p for p in weights + self._run.gradients.parameters}.values())

    def capture(self) -> None:
        """Record version and address of each weight."""
        self._marks = [(version_of(p), p.data_ptr()) for p in self._weights]

    @property
    def changed(self) -> bool:
        """Whether any weight was written to or moved since."""
        return [(version_of(p), p.data_ptr()) for p in self._weights] != self._marks


def check_layers(trainer: TrainerLike) -> None:
    """Raise SettingError for layers whose outputs depend on the size of the micro-batch."""
    layers = layers_mixing_rows(trainer.model, trainer.loss)
    if not layers:
        return
    shown = listed(layers, 3)
    raise SettingError(
        f'on_oom="split" and {shown} in train mode: its mean over a micro-batch would be one over a part of it',
        want="layers that take each row by itself, or statistics that stay",
        fix="GroupNorm or LayerNorm, or freeze(model, ...); or smaller batches, with accumulate=2, without on_oom",
    )


FEW = 8
"""Number of rows in the comparison of a batch with its parts."""


def _part(window: Window, index: int, rows: range) -> tuple[Any, int]:
    """Return (batch of these rows, number of rows) of a micro-batch."""
    return slice_rows(window.batches[index], rows, of=window.rows[index]), len(rows)


def _size(batch: Any) -> int:
    """Return the number of elements of all tensors and arrays of a batch, as a measure of its memory."""
    leaves = (leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor | np.ndarray))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _why_uncut(batch: Any, rows: int) -> str:
    """Return why a micro-batch cannot be cut into rows; "" if it can."""
    packed = isinstance(batch, nn.utils.rnn.PackedSequence)
    odd = any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors_in(batch))
    if packed or odd:
        return f"a batch with a {'PackedSequence' if packed else 'nested or sparse tensor'} is not cut"
    try:
        found = sliceable_rows(batch, "train")
    except DataError as error:
        return f"its rows are not known: {str(error).splitlines()[1].strip()}"
    return "" if found == rows else f"a batch of {found} rows counts {rows}"


def _noted(error: BaseException, why: str) -> BaseException:
    """Return the error with a note on why its window was not split."""
    error.add_note(f'on_oom="split" did not help: {why}')
    return error


CLOSE = {torch.float64: 1e-7, torch.float32: 3e-3}
"""Tolerance between sums in different orders, relative to the largest term, by dtype of the weights."""
COARSE = 3e-2
"""The same in half precision."""


class PartsLoss(NamedTuple):
    """The result of a comparison. All fields are empty if the losses are equal."""

    refused: str = ""
    """Why the losses differ."""
    unknown: str = ""
    """Why they cannot be compared."""
    again: bool = False
    """Whether to compare again with fewer rows."""


def compare_parts(run: Run, complete: Window, parts: Window) -> PartsLoss:
    """Compare the loss of some rows at once with the loss of the same rows in parts.

    The caller restores the state afterwards.
    """
    try:
        return _compared(run, complete, parts)
    except Exception as error:  # a step may raise anything on a part, also an out-of-memory error
        if is_out_of_memory(error):
            return PartsLoss(unknown="there is no memory for two rows at once", again=True)
        return PartsLoss(refused=f"a part of its rows cannot be run: {first_line(error)}")


def _compared(run: Run, complete: Window, parts: Window) -> PartsLoss:
    before = random_state()
    losses, draws = _losses(run, complete, parts), have_moved(before)
    if draws:  # noise differs between batch and parts: compare without it if possible
        roots = [root for root in (run.trainer.model, run.trainer.loss) if isinstance(root, nn.Module)]
        set_random_state(before)
        with evaluating(*roots):
            losses, draws = _losses(run, complete, parts), have_moved(before)
    if draws:
        return PartsLoss(unknown="steps draw random numbers in eval mode too")
    one, several, largest = losses
    if not math.isfinite(one) or not math.isfinite(several):
        return PartsLoss(unknown="the loss of the first rows is not finite")
    if abs(one - several) <= _close(run) * max(abs(one), largest):
        return PartsLoss()
    n = ", ".join(map(str, parts.rows))
    why = "a row's loss depends on the other rows of its micro-batch"
    return PartsLoss(f"{why}: of {sum(parts.rows)} rows at once it is {one:.6g}, in parts of {n} it is {several:.6g}")


def _losses(run: Run, complete: Window, parts: Window) -> tuple[float, float, float]:
    """Return the loss of the complete window, the summed loss of the parts, and the largest term of that sum."""
    (one,), several = _run(run, complete), _run(run, parts)
    return one, math.fsum(several), max(map(abs, several))


def _run(run: Run, window: Window) -> list[float]:
    """Return the weighted losses of a window's micro-batches, which sum to its loss. Records nothing."""
    tracker, found = run.tracker, list[float]()
    tracker.window, was_recording, tracker.recording = window, tracker.recording, False
    window.restart()
    window.begun = True
    try:
        for index in range(len(window.batches)):
            with run.autocast:
                returned = run.strategy.step(window[index])
            step_loss = tracker.record(returned)
            assert step_loss is not None
            found.append(float(weighted_value(step_loss.loss, step_loss.weight)))
    finally:
        tracker.recording = was_recording
    return [loss * float(window.missing_factor) for loss in found]


def _close(run: Run) -> float:
    kinds = {parameter.dtype for parameter in run.gradients.parameters}
    return COARSE if not isinstance(run.autocast, nullcontext) else max(CLOSE.get(kind, COARSE) for kind in kinds)
