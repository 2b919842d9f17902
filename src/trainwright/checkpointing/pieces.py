"""Tensors that lie in pieces in several files of a checkpoint: the list of the pieces, checked, and the whole of them.

The list is JSON, the files are safetensors: nothing of it can run. In a file a piece bears the name of its tensor.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.files import read_file
from trainwright.core.errors import CheckpointError

INDEX = "shards.json"
"""The file of a checkpoint that lists the pieces."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the file that it lies in."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Where in the whole it belongs."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that lies in pieces, which together are all of it, once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Pieces:
    """All tensors of one checkpoint that lie in pieces, by name; `files`: size and checksum of its files."""

    def __init__(self, path: Path, files: Mapping[str, Mapping[str, Any]], wholes: Mapping[str, Whole]) -> None:
        self.path, self.files, self.wholes = path, files, wholes
        self._by_file: dict[str, list[tuple[str, Piece]]] = {}
        for name, whole in wholes.items():
            for piece in whole.pieces:
                self._by_file.setdefault(piece.file, []).append((name, piece))

    def named(self, name: str) -> str:
        """The name, if it is one of these; CheckpointError for one that a tree has and the list has not."""
        if name not in self.wholes:
            raise CheckpointError(f"{self.path / INDEX} is damaged: it does not list {name}")
        return name

    def read(self, file: str, *, fill: bool = True) -> Mapping[str, Tensor]:
        """What one file holds, each byte checked; CheckpointError also where a piece is not there as it is listed.

        Without `fill` the tensors have no values.
        """
        use = tensorfile.read if fill else tensorfile.outline
        tensors = read_file(self.path / file, use, expected=self.files[file]).tensors
        for name, piece in self._by_file[file]:
            found, dtype = tensors.get(name), self.wholes[name].dtype
            if found is None or (found.dtype, tuple(found.shape)) != (dtype, piece.sizes):
                raise CheckpointError(f"{self.path / file} is damaged: {name} is not in it as {INDEX} says")
        return tensors

    def check(self, files: Iterable[str]) -> None:
        """Check files and forget them; CheckpointError where one is damaged."""
        for file in files:
            self.read(file, fill=False)

    def whole(self, names: Collection[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, put together from their files, of which one at a time is in memory."""
        made = {name: torch.empty(self.wholes[name].shape, dtype=self.wholes[name].dtype) for name in names}
        for file in self.shard_files:
            wanted = [(name, piece) for name, piece in self._by_file[file] if name in made]
            tensors = self.read(file) if wanted else {}
            for name, piece in wanted:
                made[name][piece.box] = tensors[name]
        return made

    @property
    def shard_files(self) -> list[str]:
        """The files that hold pieces."""
        return sorted(self._by_file)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Stands in a tree for a tensor that lies in pieces, until it is known who needs which part of it."""

    pieces: Pieces
    name: str

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole."""
        return torch.Size(self.pieces.wholes[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.pieces.wholes[self.name].dtype


def index_text(wholes: Mapping[str, Whole]) -> bytes:
    """The list of the pieces as it is written. CheckpointError where some do not make up their tensor."""
    for name, whole in wholes.items():
        if not fills(whole):
            raise CheckpointError(f"the processes have given pieces of {name} that do not make it up")
    listed = {
        name: {
            "dtype": tensorfile.TAGS[whole.dtype],
            "shape": whole.shape,
            "pieces": [{"file": one.file, "offsets": one.offsets, "sizes": one.sizes} for one in whole.pieces],
        }
        for name, whole in wholes.items()
    }
    return json.dumps({"version": _VERSION, "tensors": listed}, separators=(",", ":")).encode("ascii")


def read_pieces(path: Path, files: Mapping[str, Mapping[str, Any]]) -> Pieces:
    """The pieces of a checkpoint that has some; CheckpointError names what is wrong with the list."""
    text = read_file(path / INDEX, lambda file: file.read_all(), expected=files[INDEX])
    try:
        listed = json.loads(text)
        if listed["version"] != _VERSION:
            raise CheckpointError(f"{path / INDEX} has version {listed['version']!r}, and {_VERSION} is read here")
        wholes = {name: _whole(fields) for name, fields in listed["tensors"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged: it cannot be read ({error!r})") from error
    for name, whole in wholes.items():
        if not fills(whole) or any(piece.file not in files for piece in whole.pieces):
            raise CheckpointError(f"{path / INDEX} is damaged: its pieces of {name} do not make it up")
    return Pieces(path, files, wholes)


def fills(whole: Whole) -> bool:
    """Whether every element of a tensor is in one piece, and in one only."""
    for piece in whole.pieces:
        boxed = len(piece.offsets) == len(piece.sizes) == len(whole.shape)
        if not boxed or any(
            at < 0 or size < 1 or at + size > length
            for at, size, length in zip(piece.offsets, piece.sizes, whole.shape, strict=True)
        ):
            return False
    return sum(prod(piece.sizes) for piece in whole.pieces) == prod(whole.shape) and not _overlap(whole.pieces)


def _overlap(pieces: Collection[Piece]) -> bool:
    """Whether two boxes share an element; boxes in order, so that each is compared with its neighbours alone."""
    open_boxes: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets):
        open_boxes = [one for one in open_boxes if not one.offsets or one.box[0].stop > piece.offsets[0]]
        for one in open_boxes:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(one.box, piece.box, strict=True)):
                return True
        open_boxes.append(piece)
    return False


def _whole(fields: Any) -> Whole:
    pieces = tuple(Piece(_text(one["file"]), _sizes(one["offsets"]), _sizes(one["sizes"])) for one in fields["pieces"])
    return Whole(tensorfile.DTYPES[fields["dtype"]], _sizes(fields["shape"]), pieces)


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise ValueError(f"{value!r} are no sizes")
    return tuple(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is no name")
    return value
