"""Windows by themselves: grouping, rows, counts, weights and the missing factor; `accumulate=` checked."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainwright import DataError, SettingError, Window, windows
from trainwright.update.window import accumulation, rows_of


def batch(rows):
    return torch.zeros(rows, 2), torch.zeros(rows)


def test_counts_are_taken_of_host_batches_before_they_are_moved():
    log = []
    count, move = lambda b: log.append("count") or len(b[1]), lambda b: log.append("move") or b
    window = next(windows(iter([batch(2), batch(3)]), 2, count=count, move=move))
    assert log == ["count", "count"] and window.counts == [2, 3]
    assert len(list(window)) == 2 and log[2:] == ["move", "move"]
    window[0], window[0:2]
    assert log[4:] == ["move"] * 3


def test_a_lone_batch_is_counted_by_a_given_count_and_moved_once():
    assert next(windows(iter([batch(2)]), 1)).counts is None
    assert next(windows(iter([batch(2)]), 1, count=lambda b: 7)).counts == [7]
    moved = []
    window = next(windows(iter([batch(2)]), 1, move=lambda b: moved.append(b) or b))
    assert window[0] is window[0] and len(moved) == 1


def run(window, counts):
    """The inverse weights of sums with these counts, and the missing factor."""
    divisors = []
    for position, count in enumerate(counts):
        window.position = position
        divisors.append(1 / window.weight(count, is_sum=True))
    return divisors, window.missing_factor


def test_shares_are_counts_over_the_whole_and_add_up_to_one():
    assert Window([0, 0], [3, 5]).shares == [3 / 8, 5 / 8]
    assert Window([0, 0, 0], [4, 4, 4], counts=[3, 0, 1]).shares == [0.75, 0.0, 0.25]
    assert Window([0, 0], [4, 4], counts=[0, 0]).shares == [0, 0]
    shares = Window([0, 0], [4, 4], counts=[torch.tensor(1), torch.tensor(2)]).shares
    assert [float(share) for share in shares] == [1 / 3, 2 / 3]


def test_windows_of_something_that_can_be_iterated_again_end_with_its_pass():
    assert [len(window) for window in islice(windows([batch(2)] * 5, 2), 9)] == [2, 2, 1]


Pair = namedtuple("Pair", "x y")


@dataclass
class Held:
    name: str
    x: torch.Tensor


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (torch.zeros(3, 2), 3),
        (batch(4), 4),
        (Pair(torch.zeros(5), torch.zeros(5, 2)), 5),
        ({"name": "a", "x": torch.zeros(6, 1)}, 6),
        ({"scale": torch.tensor(1.0), "x": [torch.zeros(7, 1)]}, 7),
        (Held("a", torch.zeros(8)), 8),
        ([torch.zeros(5, 3), torch.zeros(7, 3), torch.zeros(2, 3)], 3),
        (([torch.zeros(5, 3), torch.zeros(7, 3)], torch.zeros(2)), 2),
        (
            (
                [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)],
                [{"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(2, 4)}],
            ),
            2,
        ),
        (((torch.zeros(3, 8, 8),), ({"boxes": torch.zeros(5, 4)},)), 1),
        (([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], [torch.zeros(1, 4), torch.zeros(2, 4)], torch.zeros(2)), 2),
        (((torch.zeros(6, 3), torch.zeros(6, 2)), (torch.zeros(6), torch.zeros(6, 1))), 6),
        (({"x": torch.zeros(6, 3)}, {"y": torch.zeros(6)}), 6),
        (pack_sequence([torch.zeros(n) for n in (2, 3, 1, 1)], enforce_sorted=False), 4),
        ([pack_sequence([torch.zeros(3), torch.zeros(2)]), torch.zeros(2)], 2),
    ],
)
def test_rows_are_dim_0_of_the_first_tensor_or_the_length_of_a_ragged_list(given, rows):
    assert rows_of(given) == rows


@pytest.mark.parametrize("given", [{"name": "a"}, (), torch.tensor(1.0), "text"])
def test_a_batch_without_rows_is_refused_with_the_override_to_write(given):
    with pytest.raises(DataError, match="override count"):
        rows_of(given)


def test_accumulation_is_a_table_from_epoch_0():
    assert accumulation(3) == ((0, 3),)
    assert accumulation({5: 4, 0: 1}) == ((0, 1), (5, 4))


@pytest.mark.parametrize("setting", [0, -1, True, 1.5, "2", {0: 0}, {-1: 2, 0: 1}, {0: 1, 2.5: 4}, {1: 4}, {}])
def test_a_setting_that_is_no_table_is_refused(setting):
    with pytest.raises(SettingError, match="accumulate="):
        accumulation(setting)
