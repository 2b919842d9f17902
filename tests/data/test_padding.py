"""Rows of unequal length as one batch: padded, with a mask of the real entries; mistakes are refused."""

from __future__ import annotations

import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainwright import batches
from trainwright.core.errors import DataError, SettingError
from trainwright.data import pad
from trainwright.data.transforms import padding
from trainwright.update.batches import TARGETS

Pair = namedtuple("Pair", ["tokens", "label"])
KINDS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": lambda row: torch.tensor(row, dtype=torch.int64),
    "array": lambda row: np.array(row, dtype=np.int64),
    "list": lambda row: row,
    "bytes": bytes,
    "bytearray": bytearray,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_of_any_kind_is_padded_behind_its_end(kind: str) -> None:
    rows = [KINDS[kind](row) for row in ([1, 2, 3], [], [4])]
    padded, mask = pad(value=9)(rows)
    assert padded.tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert (padded.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_a_read_only_array_is_padded_without_a_warning() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    padded, _ = pad()([array, np.ones(1)])
    assert padded.dtype == torch.float64
    assert padded.tolist() == [[0, 1, 2], [1, 0, 0]]


def test_tuples_end_with_the_target_and_the_mask_or_the_lengths_come_before_it() -> None:
    rows = [([1, 2], 5), ([3], 6)]
    tokens, mask, target = pad()(rows)
    assert (tokens.tolist(), mask.tolist(), target.tolist()) == (
        [[1, 2], [3, 0]],
        [[True, True], [True, False]],
        [5, 6],
    )
    tokens, lengths, target = pad(returns="lengths")([Pair(*row) for row in rows])
    assert (lengths.tolist(), lengths.dtype, target.tolist()) == ([2, 1], torch.int64, [5, 6])
    tokens, target = pad(returns=None)(rows)
    assert target.tolist() == [5, 6]


def test_targets_that_are_sequences_are_padded_by_the_index_that_losses_ignore() -> None:
    rows = [([1, 2], [7, 8]), ([3], [9])]
    *_, target = pad(value=4)(rows)
    assert target.tolist() == [[7, 8], [9, -100]]
    *_, target = pad(ignore_index=0)(rows)
    assert target.tolist() == [[7, 8], [9, 0]]


@pytest.mark.parametrize("key", TARGETS)
def test_dicts_keep_their_keys(key: str) -> None:
    batch = pad()([{"tokens": b"ab", key: [1, 2], "name": "x"}, {"tokens": b"c", key: [3], "name": "y"}])
    assert list(batch) == ["tokens", key, "name", "mask"]
    assert batch[key].tolist() == [[1, 2], [3, -100]]
    assert batch["name"] == ["x", "y"]
    assert TARGETS == padding.TARGETS, "the same as for the default steps"


def test_several_inputs_have_a_mask_each_or_the_one_that_is_asked_for() -> None:
    rows = [{"source": [1, 2], "words": [1], "y": 0}, {"source": [3], "words": [4, 5, 6], "y": 1}]
    batch = pad(returns="lengths")(rows)
    assert (batch["source_lengths"].tolist(), batch["words_lengths"].tolist()) == ([2, 1], [1, 3])
    batch = pad(of="words")(rows)
    assert set(batch) == {"source", "words", "y", "mask"}
    assert batch["mask"].shape == (2, 3)
    tuples = [tuple(row.values()) for row in rows]
    assert [one.shape[-1] for one in pad()(tuples)[:4]] == [2, 3, 2, 3]
    assert len(pad(of=1)(tuples)) == 4


def test_further_dimensions_stay_and_widths_are_multiples() -> None:
    rows = [(torch.ones(n, 3, 2), n) for n in (5, 2, 0)]
    padded, mask, _ = pad(multiple=4, value=-1)(rows)
    assert padded.shape == (3, 8, 3, 2)
    assert mask.sum(1).tolist() == [5, 2, 0]
    assert (padded[~mask] == -1).all()
    assert (padded[mask] == 1).all()


def test_types_are_kept_widened_or_as_asked() -> None:
    assert pad(returns=None)([[1, 2], [], [0.5]]).tolist() == [[1, 2], [0, 0], [0.5, 0]]
    assert pad(returns=None)([[], [1]]).dtype == torch.int64
    assert pad(returns=None)([[1], [2]]).dtype == torch.int64
    tokens, _, target = pad(dtype=torch.float32)([([1], [1]), ([2], [2])])
    assert (tokens.dtype, target.dtype) == (torch.float32, torch.int64)
    *_, label = pad()([([1], 0.5), ([2], 1.5)])
    assert label.dtype == torch.float32
    *_, label = pad()([([1], np.float64(0.5)), ([2], np.float64(1.5))])
    assert label.dtype == torch.float64


def test_a_collate_function_reaches_workers_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(pad(multiple=2))) == pad(multiple=2)


def test_a_few_rows_of_unequal_length_are_no_columns() -> None:
    (batch,) = batches([torch.ones(2), torch.ones(3)], 2, collate=pad(returns=None))
    assert batch.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_as_a_collate_function_of_batches_it_makes_batches() -> None:
    data = [([1] * n, n) for n in range(1, 8)]
    given = list(batches(data, 3, collate=pad(returns="lengths")))
    assert [tuple(one[0].shape) for one in given] == [(3, 3), (3, 6), (1, 7)]
    assert all(torch.equal(one[1], one[2]) for one in given)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: pad(returns="masks"), r"returns='masks'(.|\n)*\"mask\", \"lengths\" or None"),
        (lambda: pad(multiple=0), "multiple=0"),
        (lambda: pad(value="x"), "value='x'"),
        (lambda: pad(dtype="float32"), r"dtype='float32'(.|\n)*pad\(dtype=torch.float32\)"),
        (lambda: pad()([torch.ones(2, 3), torch.ones(2, 4)]), r"the rows cannot be joined(.|\n)*\(2, 3\)"),
        (lambda: pad()([([1], [2]), ([1], 2)]), r"field 1 of the rows cannot be joined"),
        (lambda: pad()([([1], object()), ([1], object())]), r"field 1(.|\n)*object"),
        (lambda: pad()([([1], 2), ([1], 2, 3)]), r"differ in form"),
        (lambda: pad()([{"a": [1]}, {"b": [1]}]), r"differ in form"),
        (lambda: pad(value=0.5)([[1], [2]]), r"padding by 0.5 in torch.int64"),
        (lambda: pad()([([1], torch.ones(1, dtype=torch.uint8))]), r"padding by -100 in torch.uint8"),
        (lambda: pad()([([1], torch.ones(1, dtype=torch.bool))]), r"padding by -100 in torch.bool"),
        (lambda: pad()([{"a": [1], "mask": [1]}]), None),
        (lambda: pad()([{"a": [1], "mask": 1}]), r"adds 'mask' to the batch(.|\n)*returns=None"),
        (lambda: pad(of="b")([{"a": [1], "y": 1}]), r"of='b'(.|\n)*'a', 'y'"),
        (lambda: pad(of="y")([{"a": [1], "y": 1}]), r"of='y'"),
    ],
)
def test_mistakes_are_refused_by_name(call: Callable[[], Any], named: str | None) -> None:
    if named is None:
        assert {"a_mask", "mask_mask"} <= set(call())
        return
    with pytest.raises((SettingError, DataError), match=named):
        call()
