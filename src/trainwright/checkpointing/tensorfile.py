"""Reads and writes safetensors files: a JSON header, then the bytes of the tensors. They contain no code.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, header, data without holes, little endian).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.checkpointing.files import FileReader, FileWriter

MAX_HEADER = 100_000_000
"""Maximum bytes of a header in the format."""
SPARE_HEADER, ENTRY = 1 << 20, 1 << 10
"""A header is parsed up to `SPARE_HEADER` bytes plus `ENTRY` bytes per byte of tensors."""
CHUNK = 1 << 24
"""Bytes per copy from a device."""

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: dict[str, torch.dtype] = {tag: getattr(torch, name) for tag, name in _NAMES.items()}
"""Dtypes by their names in the format."""
TAGS: dict[torch.dtype, str] = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The tensors of one file, in the order of its header, and its metadata."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write(target: FileWriter, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors`. Contiguous CPU tensors are written without a copy; others are copied, by pieces from a device.

    CheckpointError names a tensor whose dtype the format lacks.
    """
    _require_little_endian()
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    header |= dict.fromkeys(tensors)  # in this order, which differs from the order of the data
    in_file = sorted(tensors, key=lambda name: -tensors[name].element_size())  # aligns every tensor
    at = 0
    for name in in_file:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.dtype not in TAGS:
            raise _unknown(name, tensor)
        start, at = at, at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, at]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little"))
    target.write(text)
    for name in in_file:
        for piece in _pieces(tensors[name]):
            target.write(piece)


def read(
    source: FileReader, *, fill: bool = True, check: Callable[[Mapping[str, tuple[int, ...]]], None] | None = None
) -> Contents:
    """Read a file into new memory. CheckpointError if the header does not fit the file exactly.

    `fill`: False reads the header alone, and returns tensors without values. `check`: called with the shapes before
    memory is allocated.
    """
    header, data_size = read_header(source)
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise _defect(source, "its __metadata__ is not text by name")
    entries = {name: _entry(source, name, fields) for name, fields in header.items()}
    in_file = sorted(entries.items(), key=lambda item: item[1].offsets)
    starts = [entry.offsets[0] for _, entry in in_file]
    stops = [entry.offsets[1] for _, entry in in_file]
    if [0, *stops] != [*starts, data_size]:
        raise _defect(source, f"its tensors do not fill the {data_size} bytes after the header, each byte once")
    if check is not None:
        check({name: entry.shape for name, entry in entries.items()})
    tensors = {name: _tensor(source, name, entry, fill=fill) for name, entry in in_file}
    return Contents({name: tensors[name] for name in entries}, metadata)


def read_header(source: FileReader) -> tuple[dict[str, Any], int]:
    """Return the header, and the number of data bytes after it. CheckpointError for another format."""
    _require_little_endian()
    if source.size < 8:
        raise _defect(source, f"{source.size} bytes are too short for a header")
    prefix = bytearray(8)
    source.readinto(memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    data_size = source.size - 8 - length
    if length > MAX_HEADER or data_size < 0:
        raise _defect(source, _other_format(prefix))
    if length > SPARE_HEADER + ENTRY * data_size:
        raise _defect(source, f"its header has {length} bytes, for {data_size} bytes of tensors")
    text = bytearray(length)
    source.readinto(memoryview(text))
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _defect(source, f"its header is not JSON ({error})") from None
    if type(header) is not dict:
        raise _defect(source, "its header is no JSON object")
    return header, data_size


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a header. `offsets`: start and stop in the bytes of data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, int]


def _entry(source: FileReader, name: str, fields: Any) -> _Entry:
    if type(fields) is not dict or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise _defect(source, f"tensor {name!r} has no dtype, shape and data_offsets")
    tag, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(tag) is not str or tag not in DTYPES:
        raise _defect(source, f"tensor {name!r} has dtype {tag!r}, which this torch does not have")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise _defect(source, f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    if prod(shape) * DTYPES[tag].itemsize != offsets[1] - offsets[0]:
        raise _defect(source, f"tensor {name!r} of shape {shape} and dtype {tag} does not take bytes {offsets}")
    return _Entry(DTYPES[tag], tuple(shape), (offsets[0], offsets[1]))


def _are_sizes(value: Any) -> bool:
    """Return whether `value` is a list of integers that torch accepts as sizes."""
    return type(value) is list and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _tensor(source: FileReader, name: str, entry: _Entry, *, fill: bool) -> Tensor:
    try:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise _defect(source, f"no memory for tensor {name!r} of shape {list(entry.shape)} ({reason})") from None
    if fill and tensor.numel():
        source.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return tensor


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    for piece in flat.split(CHUNK):
        yield piece.cpu().numpy().data


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise CheckpointError("this machine stores numbers with the highest byte first", want="little endian")


def _other_format(prefix: bytearray) -> str:
    """Return the kind of a file with these first bytes that is not a safetensors file."""
    reads = "torch.load(path, weights_only=True) reads it"
    if prefix.startswith(b"PK"):
        return f"it is an archive, as torch.save writes: {reads}"
    if prefix.startswith(b"\x80") and prefix[1] in range(2, 6):
        return f"it is a pickle, as torch.save wrote before torch 1.6: {reads}"
    return "it does not begin as a safetensors file does"


def _unknown(name: str, tensor: Tensor) -> CheckpointError:
    reserved = name == "__metadata__"
    why = "the format reserves that name" if reserved else f"no safetensors dtype is {tensor.dtype}"
    return CheckpointError(f"tensor {name!r} cannot be stored: {why}", want=f"a dtype of {', '.join(DTYPES)}")


def _defect(source: FileReader, what: str) -> CheckpointError:
    return CheckpointError(f"{source.label} is no complete safetensors file: {what}")
