"""A tree comes back exactly as it was, or is refused with the path of a value in it."""

import enum
import json
import math
import pickle
import re
import struct
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from trainwright.checkpointing.files import read_file, replace_file
from trainwright.checkpointing.tensorfile import Contents, read
from trainwright.checkpointing.tree import MAX_DEPTH, flatten, loads, plain_data
from trainwright.core.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.complex128, torch.uint16]


def through_files(tree, tmp_path):
    """The tree after a text and a file, as in a checkpoint."""
    jsonable, tensors = flatten(tree)
    text = json.dumps(jsonable, allow_nan=False)
    replace_file(tmp_path / "t", Contents(tensors, {}))
    return loads(text, read_file(tmp_path / "t", read).tensors)


def raw(tensor):
    """The bytes of a tensor; `contiguous` would leave an empty one its strides."""
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()


def same(one, other):
    """Equal in type, bits and layout, through all levels."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape, one.stride(), one.requires_grad)
            == (other.dtype, other.shape, other.stride(), other.requires_grad)
        ) and raw(one) == raw(other)
    if isinstance(one, np.ndarray):
        flags = one.flags.f_contiguous == other.flags.f_contiguous if one.flags.c_contiguous else True
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes() and flags
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    return one == other


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))).to(dtype)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else tensor


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=9),
    tensors().filter(lambda t: t.is_leaf),
    hnp.arrays(
        st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes(max_len=3)), hnp.array_shapes(min_dims=0, min_side=0)
    ),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
)
keys = st.one_of(st.text(max_size=4), st.integers(), st.sampled_from(["$tuple", "$tensor", "a.b", "__metadata__"]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(tree=trees)
def test_every_tree_comes_back_in_type_bits_and_order(tree, tmp_path_factory):
    assert same(tree, through_files(tree, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize(
    "value", [-0.0, 0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1, 2**63, -(2**63) - 1], ids=repr
)
def test_numbers_that_json_loses_come_back(value, tmp_path):
    assert same({"a": value}, through_files({"a": value}, tmp_path))


def test_memory_that_tensors_share_is_shared_again(tmp_path):
    flat = torch.arange(12.0)
    weight = nn.Parameter(torch.randn(3))
    tree = {
        "flat": flat,
        "first": flat[:4],
        "rows": flat.view(3, 4).t(),
        "w": weight,
        "tied": weight,
        "bits": flat.view(torch.int32),
    }
    back = through_files(tree, tmp_path)
    assert all(same(tree[name], back[name]) for name in tree)
    back["flat"][1] = 100.0
    assert back["first"][1] == 100.0 and back["rows"][1, 0] == 100.0 and back["bits"][1] == 0x42C80000
    assert back["w"] is back["tied"] and isinstance(back["w"], nn.Parameter)
    assert back["w"].data_ptr() != back["flat"].data_ptr()


def test_memory_is_written_once_and_no_more_than_is_used():
    flat = torch.arange(1000.0)
    _, tensors = flatten({"a": flat, "b": flat[10:20], "c": flat.view(10, 100)})
    assert sum(t.numel() for t in tensors.values()) == 1000
    _, tensors = flatten({"column": flat.view(10, 100)[:, 0], "wide": torch.ones(1).expand(500), "part": flat[5:7]})
    assert sum(t.numel() for t in tensors.values()) <= 10 + 1 + 1000 - 5
    _, tensors = flatten({"column": flat.view(10, 100)[:, 0].clone(), "part": flat[5:7]})
    assert {name: t.numel() for name, t in tensors.items()} == {"column": 10, "part": 2}


def test_nothing_is_copied_on_the_way_to_the_file():
    plain, turned = torch.randn(4, 5), torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    _, tensors = flatten({"plain": plain, "turned": turned})
    assert tensors["plain"].data_ptr() == plain.data_ptr()
    assert tensors["turned"].data_ptr() == turned.data_ptr()


def test_strides_come_back_even_where_they_look_the_same(tmp_path):
    pointwise = torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last)
    tree = [pointwise, torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(3).expand(4, 3)]
    tree += [
        torch.arange(10.0).unfold(0, 4, 2),
        torch.randn(6, 4)[::2, 1:3],
        torch.randn(2, 3, dtype=torch.cdouble).t(),
    ]
    assert [t.stride() for t in through_files(tree, tmp_path)] == [t.stride() for t in tree]
    assert all(torch.equal(a, b) for a, b in zip(through_files(tree, tmp_path), tree, strict=True))


def test_conjugate_and_negative_views_come_back_as_their_values(tmp_path):
    tree = [torch.randn(3, dtype=torch.cfloat).conj(), torch.randn(3, dtype=torch.cfloat).conj().imag]
    assert all(torch.equal(a, b) for a, b in zip(through_files(tree, tmp_path), tree, strict=True))


def test_an_array_in_two_places_is_one_array_again(tmp_path):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    fixed = np.arange(3)
    fixed.flags.writeable = False
    back = through_files([array, array, fixed, np.array(">", dtype="U1"), np.arange(3, dtype=">i4")], tmp_path)
    assert back[0] is back[1] and back[0].flags.f_contiguous and np.array_equal(back[0], array)
    assert back[2].flags.writeable and back[3] == ">" and back[4].dtype == np.dtype(">i4")


def test_optimizer_and_module_states_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    back = through_files({"optimizer": optimizer.state_dict(), "loss": model.state_dict()}, tmp_path)
    assert same(back["optimizer"], optimizer.state_dict())
    assert back["loss"]._metadata == model.state_dict()._metadata


class Color(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class Exploding:
    def __reduce__(self):
        return (pytest.fail, ("ran",))


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        ({1, 2}, "sorted"),
        (Path("x"), "str(x)"),
        (Color.RED, ".value"),
        (Pair(1, 2), "tuple(x)"),
        (deque([1]), "list(x)"),
        (defaultdict(list), "dict(x)"),
        (torch.Size([1]), "tuple(x)"),
        (torch.float32, "str(x)"),
        (bytearray(b"x"), "bytes(x)"),
        (1j, "x.real"),
        (torch.Generator(), "get_state()"),
        (nn.Linear(1, 1), "x.state_dict()"),
        (np.ma.array([1]), "np.array"),
        (np.array([None]), "tolist"),
        (np.zeros(2, dtype="i4,f4"), "tolist"),
        (torch.ones(2, requires_grad=True) * 2, "detach"),
        (torch.eye(2).to_sparse(), "dense"),
        (torch.empty(2, device="meta"), "meta device"),
        (nn.UninitializedParameter(), "UninitializedParameter"),
        ({None: 1}, "str or an int"),
        ({True: 1}, "str or an int"),
        ({np.int64(1): 1}, "str or an int"),
        (Exploding(), "leave it out"),
        (lambda: None, "leave it out"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_path_and_a_fix(value, cure):
    with pytest.raises(CheckpointError) as caught:
        flatten({"state": {"queue": [0, 1, 2, value]}})
    with pytest.raises(CheckpointError, match=re.escape(str(caught.value).partition("\n  where")[0])):
        plain_data({"state": {"queue": [0, 1, 2, value]}})
    assert "state['queue'][3] " in str(caught.value)
    assert cure in str(caught.value)


def test_a_tree_that_contains_itself_is_refused():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(loop)
    deep = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    plain, tensors = flatten(deep)
    assert same(loads(json.dumps(plain), tensors), deep)


BASE = {"t": torch.arange(6, dtype=torch.uint8)}


@pytest.mark.parametrize(
    "node",
    [
        {"$pickle": "gASVDQAAAAAAAAB9lIwBYZRLAXMu"},
        {"$tensor": "elsewhere"},
        {"$tensor": "t", "offset": 0, "size": [7], "stride": [1]},
        {"$tensor": "t", "offset": -1, "size": [2], "stride": [1]},
        {"$tensor": "t", "offset": 0, "size": [2], "stride": [-1]},
        {"$tensor": "t", "offset": 0, "size": [2], "stride": [1], "dtype": "torch.float64"},
        {"$tensor": "t", "dtype": "os.system", "size": [1]},
        {"$tensor": "t", "requires_grad": True},
        {"$array": "t", "dtype": "|O", "shape": [0], "order": "C"},
        {"$array": "t", "dtype": "i4,O", "shape": [0], "order": "C"},
        {"$array": "t", "dtype": "<i4", "shape": [2], "order": "C"},
        {"$scalar": "|O", "bytes": "0000000000000000"},
        {"$scalar": "<f8", "bytes": "00"},
        {"$bytes": "!"},
        {"$int": "0x"},
        {"$float": []},
        {"$dict": [[[], 1]]},
        {"$tuple": 3},
        {"$ordered": 3},
    ],
    ids=lambda node: json.dumps(node)[:40],
)
def test_a_node_that_flatten_never_writes_is_a_checkpoint_error(node):
    with pytest.raises(CheckpointError):
        loads(json.dumps([node]), BASE)


def test_a_device_without_memory_is_no_damage_of_a_checkpoint():
    def full(_):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        loads('{"a": {"$elsewhere": "model.weight"}}', {}, find=full)


def test_no_pickle_is_read_or_written(monkeypatch, tmp_path):
    def ran(*_args, **_kwargs):
        raise AssertionError("pickle")

    for name in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, ran)
    tree = {"a": torch.ones(2), "b": np.ones(2), "c": (1, b"x", np.float32(2.0))}
    assert same(tree, through_files(tree, tmp_path))


def test_an_int_too_long_for_python_to_print_comes_back(tmp_path):
    assert through_files([1 << 20_000, -(1 << 20_000)], tmp_path) == [1 << 20_000, -(1 << 20_000)]


@pytest.mark.gpu
def test_tensors_of_a_device_are_read_to_the_cpu_or_moved_with_their_ties(tmp_path):
    flat = torch.arange(12.0, device="cuda")
    tree = {"flat": flat, "rows": flat.view(3, 4).t(), "host": torch.ones(2)}
    back = through_files(tree, tmp_path)
    assert all(t.device.type == "cpu" for t in back.values())
    jsonable, tensors = flatten(tree)
    replace_file(tmp_path / "t", Contents(tensors, {}))
    back = loads(json.dumps(jsonable), read_file(tmp_path / "t", read).tensors, device=torch.device("cuda"))
    back["flat"][4] = 100.0
    assert back["rows"][0, 1] == 100.0 and back["host"].device.type == "cpu" and back["rows"].device.type == "cuda"
