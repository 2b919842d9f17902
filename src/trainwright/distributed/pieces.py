"""Records of sharded tensors whose pieces are in several files, and their placeholders in a tree of state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, stored in a file under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the complete tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor stored in pieces; together they hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every element is in exactly one piece."""
        for piece in self.pieces:
            boxed = len(piece.offsets) == len(piece.sizes) == len(self.shape)
            if not boxed or any(
                at < 0 or size < 1 or at + size > length
                for at, size, length in zip(piece.offsets, piece.sizes, self.shape, strict=True)
            ):
                return False
        return sum(prod(piece.sizes) for piece in self.pieces) == prod(self.shape) and not _overlap(self.pieces)


class PieceReader(Protocol):
    """Reads the files that hold the pieces of tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorPieces]:
        """All tensors that are stored in pieces, by name."""
        ...

    def read(self, file: str) -> Mapping[str, Tensor]:
        """Return the pieces in one file, after a check of every byte; CheckpointError if the file is damaged."""
        ...


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The placeholder in a tree for a tensor that is stored separately; `device`: its device type, "" for the CPU."""

    name: str
    device: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """The placeholder in a loaded tree for a tensor in pieces, read once each rank's part of it is known."""

    reader: PieceReader
    name: str

    @property
    def shape(self) -> torch.Size:
        """The shape of the complete tensor."""
        return torch.Size(self.reader.tensors[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.reader.tensors[self.name].dtype


def _overlap(pieces: Collection[Piece]) -> bool:
    """Return whether two boxes share an element; sorted, so that each box is compared with few others."""
    open_boxes: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets):
        open_boxes = [one for one in open_boxes if not one.offsets or one.box[0].stop > piece.offsets[0]]
        for one in open_boxes:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(one.box, piece.box, strict=True)):
                return True
        open_boxes.append(piece)
    return False
