"""The safetensors format, against the package of that name in both directions, and against damaged headers."""

import io
import json
import struct
from contextlib import suppress

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.files import read_file
from trainwright.checkpointing.tensorfile import DTYPES, read, write
from trainwright.core.errors import CheckpointError

FOREIGN = {name: dtype for name, dtype in DTYPES.items() if name in safetensors.torch._TYPES}


def sample(dtype, shape=(3, 5)):
    """Random bits of any dtype."""
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def written(tensors, metadata=None):
    target = io.BytesIO()
    write(target, tensors, metadata)
    return target.getvalue()


def read_back(path):
    return read_file(path, read)


@pytest.fixture
def mixed():
    tensors = {name: sample(dtype) for name, dtype in DTYPES.items()}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "ünï.cödé": torch.ones(1),
        "turned": sample(torch.float32).t(),
        "every other": sample(torch.int16)[::2, 1::2],
        "spread": torch.ones(1).expand(4, 2),
        "no rows": torch.empty(0, dtype=torch.bool),
        "conjugate": sample(torch.complex64).conj(),
    }
    return tensors


def test_the_dtypes_of_the_package_are_ours():
    assert len(FOREIGN) >= 16 and all(FOREIGN[name] == safetensors.torch._TYPES[name] for name in FOREIGN)
    assert {"F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2"} <= FOREIGN.keys()


def test_the_package_reads_our_files(mixed, tmp_path):
    (tmp_path / "f").write_bytes(written(mixed, {"format": "pt", "note": "ä"}))
    with safetensors.safe_open(tmp_path / "f", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ä"}
        assert {name: bits(file.get_tensor(name)) for name in file.keys()} == {n: bits(t) for n, t in mixed.items()}  # noqa: SIM118


def test_files_of_the_package_are_read(mixed, tmp_path):
    mixed = {name: tensor.resolve_conj().contiguous() for name, tensor in mixed.items()}
    safetensors.torch.save_file(mixed, tmp_path / "f", {"format": "pt"})
    contents = read_back(tmp_path / "f")
    assert contents.metadata == {"format": "pt"}
    assert {n: bits(t) for n, t in contents.tensors.items()} == {n: bits(t) for n, t in mixed.items()}


def test_our_files_are_read_in_the_order_of_the_names(mixed, tmp_path):
    (tmp_path / "f").write_bytes(written(mixed))
    contents = read_back(tmp_path / "f")
    assert list(contents.tensors) == list(mixed) and contents.metadata == {}
    assert {n: bits(t) for n, t in contents.tensors.items()} == {n: bits(t) for n, t in mixed.items()}


def test_every_tensor_is_aligned_to_its_width(mixed):
    data = written(mixed)
    length = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % mixed[name].element_size() == 0


def test_tensors_are_written_straight_from_their_memory():
    class Target:
        def __init__(self):
            self.addresses = []

        def write(self, data):
            if isinstance(data, memoryview):
                self.addresses.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())

    target, tensors = Target(), {"a": torch.ones(1000), "b": torch.nn.Parameter(torch.ones(10, 3))}
    write(target, tensors)
    assert sorted(target.addresses) == sorted(t.data_ptr() for t in tensors.values())


def test_a_dtype_that_the_format_lacks_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"'state\.z' .*complex128"):
        written({"state.z": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="reserves"):
        written({"__metadata__": torch.ones(1)})


def damaged(header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes):
    return {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}


DAMAGES = {
    "empty": b"",
    "short": b"\1\0\0",
    "length behind the end": struct.pack("<Q", 100) + b"{}",
    "huge length": struct.pack("<Q", 2**63) + b"{}",
    "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x08builtins",
    "zip": b"PK\x03\x04" + b"\0" * 60,
    "not JSON": damaged(b"{]"),
    "not unicode": damaged(b"\xff\xfe"),
    "deep": damaged(b"[" * 100_000),
    "a list": damaged(b"[]"),
    "metadata": damaged({"__metadata__": {"a": 1}} | entry()),
    "metadata list": damaged({"__metadata__": []} | entry()),
    "no fields": damaged({"t": 3}),
    "field missing": damaged({"t": {"dtype": "F32", "shape": [4]}}),
    "field more": damaged(entry(code="x")),
    "dtype": damaged(entry(dtype="F31")),
    "dtype list": damaged(entry(dtype=[])),
    "shape": damaged(entry(shape=[5])),
    "shape negative": damaged(entry(shape=[-2, -2])),
    "shape float": damaged(entry(shape=[4.0])),
    "shape bool": damaged(entry(shape=[4, True])),
    "shape huge": damaged(entry(shape=[0, 2**70], data_offsets=[0, 0]), b""),
    "shape overflow": damaged(entry(shape=[0, 2**61, 2**61], data_offsets=[0, 0]), b""),
    "offsets": damaged(entry(data_offsets=[0, 16, 32])),
    "offsets swapped": damaged(entry(data_offsets=[16, 0])),
    "hole before": damaged(entry(data_offsets=[4, 20]), b"\0" * 20),
    "overlap": damaged(entry() | {"u": entry()["t"]}),
    "data missing": damaged(entry(), b"\0" * 15),
    "data left": damaged(entry(), b"\0" * 17),
    "terabytes": damaged(entry(shape=[2**40], data_offsets=[0, 2**42])),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_header_that_does_not_fit_the_file_is_refused_and_named(name, tmp_path):
    (tmp_path / "weights").write_bytes(DAMAGES[name])
    with pytest.raises(CheckpointError, match=str(tmp_path / "weights")):
        read_back(tmp_path / "weights")


def test_every_cut_is_an_error(tmp_path):
    data = written({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}, {"x": "y"})
    for end in range(len(data)):
        (tmp_path / "f").write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            read_back(tmp_path / "f")


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 200), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_of_ours_or_other_data_never_a_crash(at, value, tmp_path_factory):
    data = bytearray(written({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}))
    data[at % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(data)
    with suppress(CheckpointError):
        read_back(path)


@pytest.mark.parametrize("length", [int.from_bytes(b"PK", "little"), int.from_bytes(b"\x80\x02", "little")])
def test_a_header_whose_length_reads_as_the_mark_of_another_format_is_read(tmp_path, length):
    """19,280 bytes are written as PK, by which an archive begins."""
    bare = len(written({"w": torch.ones(2)}, {"pad": ""})) - 2 * 4 - 8
    path = tmp_path / "w"
    path.write_bytes(written({"w": torch.ones(2)}, {"pad": "x" * (length - bare)}))
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert torch.equal(read_back(path).tensors["w"], torch.ones(2))
