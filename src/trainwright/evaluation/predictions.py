"""Predictions: the joined outputs of a pass, in the order of the data, gathered from all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.core.device import move
from trainwright.core.errors import DataError
from trainwright.core.records import StepOutput
from trainwright.core.rng import PausedRng
from trainwright.core.trees import copy_tree, detached, sequence_like
from trainwright.data.source import Source
from trainwright.distributed.mesh import Slice
from trainwright.distributed.world import World, packed, unpacked
from trainwright.evaluation.passes import autocast_step, side_effect_free
from trainwright.precision.autocast import beside_training
from trainwright.update.trainer_like import TrainerLike, free_transfer_memory

AT_ONCE = 2**23
"""Approximate bytes of outputs per rank and gather."""
PIECE = 2**16
"""Minimum bytes of outputs per copy into the preallocated tensor: single copies of small outputs cost more."""
MOST_PINNED = 2**28
"""Maximum bytes of pinned memory for outputs of a CUDA device. Copies into it do not block."""
MOST = 128
"""Maximum number of batches per gather."""
_END: Any = object()
"""Sentinel after the last batch."""


def predict(trainer: TrainerLike, source: Source) -> Any:
    """Return the outputs of `predict_step` over one pass, in data order, joined on the CPU (see `join`).

    Each rank runs its rows of each batch and gets the outputs of all ranks: each needs host memory for all of them. The
    outputs of sharded streams are ordered by batch, then by rank.
    """
    outputs = make_outputs(trainer) if trainer.world.size > 1 or not source.rows else PreallocatedOutputs(source.rows)
    with side_effect_free(trainer, source) as aside:
        step, to_device = autocast_step(trainer, trainer.predict_step), trainer._hooks.move
        for batch in outputs.batches(aside):
            output = step(batch if to_device is None else to_device(batch))
            output = output.output if type(output) is StepOutput else output
            # A step may enable gradients. The outputs would then keep the graphs of all batches alive.
            plain = type(output) is Tensor and not output.requires_grad
            outputs.append(output if plain else detached(output))
        tensor = outputs.as_tensor()
        pieces = outputs.in_order() if tensor is None else []
    if tensor is not None:
        return tensor
    if not pieces:
        raise DataError("the data to predict gave no batch", want="at least one batch")
    with beside_training(trainer.device.type):
        return join(pieces)


def predict_batches(trainer: TrainerLike, source: Source) -> Iterator[Any]:
    """Yield the output of `predict_step` for each batch of one pass, in data order, on the CPU.

    The context of the pass is entered per batch, and left before the output is yielded. Between two outputs the caller
    sees the unchanged trainer, and may train, or drop the iterator. The pass has its own random states and its own copy
    of `state`. Several ranks iterate together; gathered outputs may come several at a time.
    """
    outputs = make_outputs(trainer)
    aside = source.independent_copy() if source.repeatable else source
    random, state = PausedRng(aside.generators), copy_tree(trainer.state)
    batches: Iterator[Any] | None = None
    known, batch = 0, None
    try:
        while batch is not _END:
            with side_effect_free(trainer, source, pauses=True):
                random.resume()
                trainer.state = state
                batches = iter(outputs.batches(aside)) if batches is None else batches
                batch = next(batches, _END)
                if batch is not _END:
                    _predict_one(trainer, outputs, batch)
                ready = outputs.take(complete=batch is _END)
                state = trainer.state
                random.pause()
            known += len(ready)
            yield from ready
    finally:
        if not trainer._record.is_under_way:
            free_transfer_memory(trainer._hooks)
    if not known:
        raise DataError("the data to predict gave no batch", want="at least one batch")


def _predict_one(trainer: TrainerLike, outputs: Outputs, batch: Any) -> None:
    """Run one batch, and append its output."""
    to_device = trainer._hooks.move
    output = autocast_step(trainer, trainer.predict_step)(batch if to_device is None else to_device(batch))
    outputs.append(detached(output.output if type(output) is StepOutput else output))


def make_outputs(trainer: TrainerLike) -> Outputs:
    """Return the empty list for the outputs of a pass, for one or several ranks."""
    return Outputs() if trainer.world.size == 1 else DistributedOutputs(trainer.world)


class Outputs(list[Any]):
    """The outputs of a pass over batches, on the host."""

    def batches(self, source: Source) -> Iterator[Any]:
        """Return the batches to run, each followed by one `append`."""
        return source.epoch(0)

    def append(self, output: Any, /) -> None:
        """Add the output of the current batch."""
        super().append(_on_host(output))

    def in_order(self) -> list[Any]:
        """Return the outputs of every batch, in the order of the data."""
        return list(self)

    def take(self, *, complete: bool) -> list[Any]:
        """Remove and return the outputs known so far. `complete`: no batch follows."""
        outputs = list(self)
        self.clear()
        return outputs

    def as_tensor(self) -> Tensor | None:
        """Return all outputs as one tensor; None if they were not copied into one. Then use `in_order`."""
        return None


class PreallocatedOutputs(Outputs):
    """The outputs of a source with a known number of rows, copied into one preallocated tensor.

    The host never stores outputs twice. Host outputs are collected until a copy pays. Copies from a CUDA device are
    queued after its kernels, without a wait before the end. From the first output of another shape or dtype on, all
    outputs are stored separately.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows, self._at = rows, 0
        self._buffer: Tensor | None = None
        self._lengths: list[int] = []
        """Rows of each copied output."""
        self._size = 0
        """Bytes of the outputs that are not copied yet."""
        self._streams: set[Any] = set()
        """The streams of the copies."""
        self._is_apart = False

    def append(self, output: Any, /) -> None:
        """Add the output of the current batch."""
        if self._is_apart or not _is_block(output):
            self._store_apart()
            super().append(output)
            return
        list.append(self, output)
        self._size += output.nbytes
        if self._size >= PIECE or not output.is_cpu:
            self._fill()

    def in_order(self) -> list[Any]:
        """Return the outputs of every batch, in the order of the data."""
        self._store_apart()
        return list(self)

    def as_tensor(self) -> Tensor | None:
        """Return all outputs as one tensor; None for several shapes or dtypes, or for few outputs."""
        if self._buffer is None or self._is_apart:
            return None
        self._fill()
        if self._is_apart or self._buffer is None:
            return None
        self._wait()
        return self._buffer if self._at == self._rows else self._buffer[: self._at].clone()

    def _fill(self) -> None:
        """Copy the collected outputs into the tensor; store all separately if shape or dtype differ."""
        pieces = list(self)
        if not pieces:
            return
        like, end = self._buffer if self._buffer is not None else pieces[0], self._at + sum(map(len, pieces))
        if end > self._rows or any(piece.shape[1:] != like.shape[1:] or piece.dtype != like.dtype for piece in pieces):
            self._store_apart()
            return
        if self._buffer is None:
            pins = pieces[0].is_cuda and self._rows * pieces[0][:1].nbytes <= MOST_PINNED
            self._buffer = torch.empty((self._rows, *like.shape[1:]), dtype=like.dtype, pin_memory=pins)
        self._copy(pieces, self._buffer[self._at : end])
        self._lengths += map(len, pieces)
        self._at, self._size = end, 0
        self.clear()

    def _copy(self, pieces: list[Tensor], target: Tensor) -> None:
        if all(piece.is_cpu for piece in pieces):
            torch.cat(pieces, out=target)
            return
        for part, piece in zip(target.split([len(piece) for piece in pieces]), pieces, strict=True):
            part.copy_(piece, non_blocking=piece.is_cuda and target.is_pinned())
            if piece.is_cuda:
                self._streams.add(torch.cuda.current_stream(piece.device))

    def _store_apart(self) -> None:
        """Store each output separately."""
        if self._is_apart:
            return
        self._is_apart = True
        self._wait()
        waiting = [_on_host(batch) for batch in self]
        self[:] = [*(() if self._buffer is None else self._buffer[: self._at].split(self._lengths)), *waiting]

    def _wait(self) -> None:
        """Wait for the copies in progress."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()


class DistributedOutputs(Outputs):
    """The outputs of several ranks, gathered during the pass: every rank has all outputs.

    All ranks run the same number of batches, since a forward may be a collective. A rank without rows runs those of
    another rank, or its last batch again, and drops the output.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._rows: int | None = None
        """The rows of this rank in the current batch."""
        self._waiting: list[tuple[Any, int | None] | None] = []
        self._limit = 1
        self._gathered: list[Any] = []

    def batches(self, source: Source) -> Iterator[Any]:
        """Return the batches to run, each followed by one `append`."""
        from trainwright.update.per_rank_state import epoch_batches, equally_long

        slices = epoch_batches(self._world, source, 0)
        return map(self._begun, slices if source.length is not None else equally_long(self._world, slices))

    def append(self, output: Any, /) -> None:
        """Add the output of the current batch."""
        super().append(None)  # counts the batches
        self._waiting.append(None if self._rows == 0 else (_on_host(output), self._rows))
        if len(self._waiting) == self._limit:
            self._gather()

    def in_order(self) -> list[Any]:
        """Return the outputs of every batch, in the order of the data."""
        if self._waiting:
            self._gather()
        return self._gathered

    def take(self, *, complete: bool) -> list[Any]:
        """Remove and return the gathered outputs. `complete`: gather the remaining ones first."""
        if complete and self._waiting:
            self._gather()
        self.clear()
        outputs, self._gathered = self._gathered, []
        return outputs

    def _begun(self, current: Slice) -> Any:
        self._rows = current.rows
        return current.batch

    def _gather(self) -> None:
        """Gather the collected outputs. All ranks have equally many, and compute the same limit for the next gather."""
        sent = self._world.all_gather(packed(self._waiting))
        for each in zip(*map(unpacked, sent), strict=True):
            self._gathered += _joined_slices([outputs for outputs in each if outputs is not None])
        fits = AT_ONCE * len(self._waiting) // max(map(len, sent))
        self._limit, self._waiting = max(1, min(2 * self._limit, fits, MOST)), []


def _is_block(output: Any) -> bool:
    """Whether an output is a tensor or array with rows, which can be concatenated."""
    plain = type(output) is Tensor and output.layout is torch.strided and not output.is_quantized
    return plain and output.ndim > 0 and not output.requires_grad


def _on_host(output: Any) -> Any:
    if type(output) is Tensor and output.is_cpu:
        return output
    return move(output, torch.device("cpu"))


def join(outputs: list[Any]) -> Any:
    """Concatenate nested outputs along their rows; return a list if the shapes differ.

    A list of dicts, one per row, is concatenated as rows; so are lists of different lengths. Other lists hold columns.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        fits = first.ndim > 0 and len({output.shape[1:] for output in outputs}) == 1
        return torch.cat(outputs) if fits else outputs
    if isinstance(first, tuple | list):
        if _are_row_lists(outputs):
            return [row for output in outputs for row in output]
        return sequence_like(first, [join(list(column)) for column in zip(*outputs, strict=True)])
    if isinstance(first, dict):
        return {key: join([output[key] for output in outputs]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: join([getattr(output, n) for output in outputs]) for n in names})
    return outputs if any(output is not None for output in outputs) else None


def _are_row_lists(outputs: list[Any]) -> bool:
    """Whether lists hold one entry per row, such as the dicts of a detector."""
    if not isinstance(outputs[0], list):
        return False
    dicts = all(isinstance(row, Mapping) for output in outputs for row in output)
    return dicts or len({len(output) for output in outputs}) > 1


def _joined_slices(pieces: list[tuple[Any, int | None]]) -> list[Any]:
    """Join the outputs of several ranks for one batch; return them separately if they cannot be joined."""
    outputs, rows = [output for output, _ in pieces], [n for _, n in pieces]
    if len(outputs) < 2 or None in rows:  # a sharded stream has separate batches on each rank
        return outputs
    try:
        return [_join_slices(outputs, [n for n in rows if n is not None])]
    except _NotJoinable:
        return outputs


class _NotJoinable(Exception):
    """The outputs of slices, concatenated, are not the output of the batch."""


def _join_slices(pieces: Sequence[Any], rows: list[int]) -> Any:
    """Concatenate the outputs of the slices of one batch. `rows`: the number of rows of each slice."""
    first = pieces[0]
    if not all(type(piece) is type(first) for piece in pieces):
        raise _NotJoinable
    if isinstance(first, Tensor):
        if not first.ndim or any(piece.shape[1:] != first.shape[1:] for piece in pieces):
            raise _NotJoinable
        return torch.cat(list(pieces))
    if isinstance(first, tuple | list):
        return _join_sequence_slices(pieces, rows)
    if isinstance(first, dict):
        if any(piece.keys() != first.keys() for piece in pieces):
            raise _NotJoinable
        return {key: _join_slices([piece[key] for piece in pieces], rows) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        joined = {name: _join_slices([getattr(piece, name) for piece in pieces], rows) for name in names}
        return dataclasses.replace(first, **joined)
    if first is None:
        return None
    raise _NotJoinable


def _join_sequence_slices(pieces: Sequence[Any], rows: list[int]) -> Any:
    first = pieces[0]
    if isinstance(first, list) and _hold_rows(pieces, rows):
        return [row for piece in pieces for row in piece]
    if any(len(piece) != len(first) for piece in pieces):
        raise _NotJoinable
    return sequence_like(first, [_join_slices(column, rows) for column in zip(*pieces, strict=True)])


def _hold_rows(pieces: Sequence[Sequence[Any]], rows: list[int]) -> bool:
    """Whether lists hold one entry per row of their slice, and not columns with as many rows."""
    if any(len(piece) != n for piece, n in zip(pieces, rows, strict=True)):
        return False
    columns = all(
        isinstance(entry, Tensor) and entry.ndim and len(entry) == n
        for piece, n in zip(pieces, rows, strict=True)
        for entry in piece
    )
    return len(set(rows)) > 1 or not columns
