"""Records of tensors that several ranks hold in pieces, and their placeholders in a tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the file that holds it under the tensor's name."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the complete tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor in pieces, which hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every element is in one piece, and in one only."""
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
        """All tensors in pieces, by name."""
        ...

    def read(self, file: str) -> Mapping[str, Tensor]:
        """Return the pieces in one file, each byte checked; CheckpointError where it is damaged."""
        ...


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Replaces in a tree a tensor that is stored beside it; `device`: the type of its device if not the CPU."""

    name: str
    device: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A placeholder in a loaded tree for a tensor in pieces, until each rank knows the part that it needs."""

    reader: PieceReader
    name: str

    @property
    def shape(self) -> torch.Size:
        """The shape of the complete tensor."""
        return torch.Size(self.reader.tensors[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.reader.tensors[self.name].dtype


def _overlap(pieces: Collection[Piece]) -> bool:
    """Return whether two boxes share an element; in order, so that each is compared with its neighbors alone."""
    open_boxes: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets):
        open_boxes = [one for one in open_boxes if not one.offsets or one.box[0].stop > piece.offsets[0]]
        for one in open_boxes:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(one.box, piece.box, strict=True)):
                return True
        open_boxes.append(piece)
    return False
