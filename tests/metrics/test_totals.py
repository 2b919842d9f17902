"""Running totals: exact counts and sums, nothing read back, NaN neither hidden nor let in."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.core.errors import SettingError
from trainwright.core.records import MeanLoss, SumLoss
from trainwright.metrics.totals import Reading, Total


class Ops(TorchDispatchMode):
    """Notes every tensor operation, reads among them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def reads(self):
        return [name for name in self.names if name in ("_local_scalar_dense", "equal", "is_nonzero", "item")]


def test_two_float32_sum_like_one_float64():
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    wide, narrow = Total(wide=True), Total(wide=False)
    for value in values:
        wide.add(value, 1)
        narrow.add(value, 1)
    true = math.fsum(values.tolist()) / len(values)
    assert narrow.value == pytest.approx(true, rel=1e-12)
    assert wide.value == pytest.approx(true, rel=1e-12)


def test_a_mean_is_weighted_by_what_it_is_a_mean_over():
    total = Total()
    total.add(torch.tensor(1.0), 30)
    total.add(4.0, 10)
    total.add(torch.tensor(2.0), torch.tensor(20))
    total.add(3.0, torch.tensor(0.5))
    assert total.value == pytest.approx((30 + 40 + 40 + 1.5) / 60.5, rel=1e-15)
    assert total.read().count == 60.5


def test_a_fractional_count_after_whole_ones_keeps_both():
    total = Total()
    total.add(torch.tensor(True), torch.tensor(3))
    total.add(torch.tensor(1), torch.tensor(0.25))
    total.add(torch.tensor(2), 0.5)
    assert total.read().count == 3.75
    assert total.value == pytest.approx((3 + 0.25 + 1) / 3.75, rel=1e-15)


def test_half_precision_values_are_summed_in_float64():
    total = Total()
    for _ in range(4096):
        total.add(torch.tensor(0.1, dtype=torch.bfloat16), 3)
    assert total.value == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-12)


@pytest.mark.parametrize("zero", [0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("nan", [math.nan, torch.tensor(math.nan)])
def test_the_nan_of_an_empty_batch_does_not_enter(zero, nan):
    total = Total()
    total.add(2.0, 4)
    total.add(nan, zero)
    total.add_sum(nan, zero)
    assert (total.value, total.read().count) == (2.0, 4)


def test_nothing_counted_is_nan():
    assert math.isnan(Total().value)


def test_masked_values_do_not_enter():
    total = Total(spread=True)
    total.add_sum(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True]))
    assert (total.value, total.read().count) == (2.0, 2)
    assert total.read().error == pytest.approx(math.sqrt(1 / 2))


def test_the_error_is_that_of_the_rows_over_all_batches():
    values = torch.rand(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = Total(spread=True)
    for batch in values.split(33):
        total.add_sum(batch, len(batch))
    assert total.read().error == pytest.approx(float(values.std(correction=0)) / 10, rel=1e-12)


def test_there_is_no_error_once_a_batch_was_not_given_by_row():
    total = Total(spread=True)
    total.add_sum(torch.rand(8), 8)
    total.add(torch.tensor(0.5), 8)
    assert total.read().error is None
    total.reset()
    total.add_sum(torch.tensor([1.0, 3.0]), 2)
    assert total.read().error is not None


@pytest.mark.parametrize(
    ("sums", "count"),
    [
        (torch.tensor(2.0), 8),
        (2.0, 8),
        (torch.tensor(2.0), torch.tensor(8)),
        (torch.rand(4), 8),
        (torch.rand(4), torch.full((4,), 2)),
    ],
)
def test_there_is_no_error_of_sums_over_more_than_a_row(sums, count):
    total = Total(spread=True)
    total.add_sum(sums, count)
    assert total.read().count == 8
    assert total.read().error is None


def test_adding_reads_nothing_back_and_keeps_no_graph():
    weight = torch.ones((), requires_grad=True)
    total = Total(spread=True, wide=True)  # as on an accelerator
    with Ops() as ops:
        total.add(weight * 2, 4)
        total.add(weight * 2, torch.tensor(4))
        total.add_sum((weight * torch.ones(4)), torch.ones(4, dtype=torch.bool))
        total.take(torch.ones(4), 4)
        assert ops.reads == []
        assert total.value == 24 / 16
        assert ops.reads != []  # the mode does see reads
    assert not any(tensor.requires_grad for tensor in total.scalars())


def test_reset_forgets_in_place():
    total = Total(spread=True)
    total.add_sum(torch.tensor([math.nan, 1.0]), 2)
    before = [tensor.data_ptr() for tensor in total.scalars()]
    total.reset()
    assert total.read().count == 0
    total.add_sum(torch.tensor([1.0, 3.0]), 2)
    assert (total.value, total.read().error) == (2.0, pytest.approx(math.sqrt(0.5)))
    assert [tensor.data_ptr() for tensor in total.scalars()] == before


@pytest.mark.parametrize("wide", [True, False])
def test_saved_sums_go_on_bit_for_bit(wide):
    values = torch.rand(200, generator=torch.Generator().manual_seed(2))

    def add(total, some):
        for value in some:
            total.add(value, 3)
            total.add(float(value) / 3, 1)
            total.add(value, torch.tensor(2))

    whole, first, second = (Total(wide=wide) for _ in range(3))
    add(whole, values)
    add(first, values[:77])
    saved = first.state_dict()
    add(first, values[77:])  # the saved state is a copy
    second.load_state_dict(saved)
    add(second, values[77:])
    assert second.read() == first.read() == whole.read()


@pytest.mark.parametrize(
    ("result", "rows", "value", "count"),
    [
        (0.5, 4, 0.5, 4),
        (torch.tensor(0.5), 4, 0.5, 4),
        (torch.tensor([1.0, 2.0]), 2, 1.5, 2),
        (MeanLoss(torch.tensor(3.0), 7), 4, 3.0, 7),
        (MeanLoss(torch.tensor(3.0), torch.tensor(7)), 4, 3.0, 7),
        (SumLoss(torch.tensor(6.0), 3), 4, 2.0, 3),
        (SumLoss(torch.tensor(6.0)), 4, 1.5, 4),
        (SumLoss(torch.tensor([6.0, 2.0]), torch.tensor([1, 3])), 2, 2.0, 4),
    ],
)
def test_a_metric_may_return_any_of_these(result, rows, value, count):
    total = Total()
    total.take(result, rows)
    assert (total.value, total.read().count) == (value, count)


@pytest.mark.parametrize(
    "result",
    [
        torch.rand(3),
        torch.rand(4, 1),
        "0.5",
        None,
        [0.5],
        SumLoss(torch.tensor(1.0), torch.rand(4)),
        MeanLoss(torch.rand(4), 4),
    ],
)
def test_anything_else_is_refused_by_name(result):
    with pytest.raises(SettingError, match="metric 'mine'"):
        Total("metric 'mine'").take(result, 4)


def flags(n=7):
    torch.manual_seed(0)
    target = torch.randint(0, 3, (n,))
    target[::3] = -100
    return torch.randint(0, 3, (n,)), target


def test_right_guesses_are_counted_as_whole_numbers_over_the_rows_that_count():
    guess, target = flags()
    total, spread = Total(), Total(spread=True)
    for each in (total, total, total, spread):
        each.take(SumLoss(guess == target, target != -100), len(guess))
    right, counted = int((guess == target).sum()), int((target != -100).sum())
    assert total.read() == Reading(right / counted, 3 * counted, None)
    assert total.scalars() == []  # nothing is left to be read
    assert spread.read().error == pytest.approx(math.sqrt(spread.value * (1 - spread.value) / counted))


def test_flags_and_other_numbers_add_up():
    total = Total()
    total.take(SumLoss(torch.tensor([True, False, True]), 3), 3)
    total.take(torch.tensor([0.5, 0.25]), 2)
    total.take(SumLoss(torch.tensor([True, True]), torch.tensor([True, False])), 2)
    assert (total.value, total.read().count) == ((2 + 0.75 + 2) / 6, 6)
    total.take(SumLoss(torch.tensor([True]), torch.tensor([False])), 1)  # a row that does not count is no row
    assert total.read().count == 6
