"""Totals, scores and objects of others' make that take in what another one has taken in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright import SettingError
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.objects import ObjectMetric
from trainwright.metrics.scores import F1, R2, RMSE
from trainwright.metrics.totals import Total


def total(*values: Any, wide: bool | None = None, spread: bool = False, count: Any = 1) -> Total:
    made = Total(wide=wide, spread=spread)
    for value in values:
        made.add_sum(value, count)
    return made


# --- totals


def test_whole_numbers_stay_exact_up_to_what_a_float64_represents() -> None:
    one, other = total(torch.tensor(2**53 - 1)), total(torch.tensor(-(2**53) + 2))
    one.merge(other)
    assert one.value * 2 == 1


@pytest.mark.parametrize("kind", [int, float])
def test_two_part_sums_lose_nothing(kind: type) -> None:
    """2^24 + 1 is no float32, and neither is 1 + 1e-9."""
    one = total(torch.tensor(2**24 + 1) if kind is int else torch.tensor(1.0), wide=False)
    other = total(*[torch.tensor(kind(v)) for v in (2**24 + 1, 3)], wide=False)
    if kind is float:
        other.add_sum(torch.tensor(1e-9), 1)
    one.merge(other)
    one.add_sum(torch.tensor(0.5), 1)
    wanted = 2 * 2**24 + 5.5 if kind is int else 1 + 2**24 + 3 + 0.5 + float(torch.tensor(1e-9))
    assert one.value * one.read().count == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("mine", [True, False, None])
@pytest.mark.parametrize("theirs", [True, False])
def test_sums_of_other_kinds_add_up(mine: bool | None, theirs: bool) -> None:
    one = total(torch.tensor(3), wide=mine)
    one.merge(total(torch.tensor(0.1, dtype=torch.float64), wide=theirs))
    one.merge(total(torch.tensor(2**30 + 1), wide=theirs))
    assert one.value * 3 == pytest.approx(2**30 + 4.1, rel=1e-14)
    one = total(torch.tensor(1.0), wide=mine)
    one.merge(total(torch.tensor(0.1, dtype=torch.float64), wide=True))
    assert one.value * 2 == pytest.approx(1.1, rel=1e-14)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_never_hidden(wide: bool, bad: float) -> None:
    for pair in ((1.0, bad), (bad, 1.0)):
        one, other = (total(torch.tensor(value), wide=wide) for value in pair)
        one.merge(other)
        assert one.value == bad or (math.isnan(bad) and math.isnan(one.value))
    one, other = total(torch.tensor(math.inf), wide=wide), total(torch.tensor(-math.inf), wide=wide)
    one.merge(other)
    assert math.isnan(one.value)


def test_an_empty_total_changes_nothing_either_way() -> None:
    full = total(torch.tensor([1.0, 2.0, 6.0]), spread=True, count=3)
    reading = full.read()
    full.merge(Total(spread=True))
    assert full.read() == reading
    empty = Total(spread=True)
    empty.merge(full)
    assert empty.read() == reading


def test_the_spread_is_that_of_all_rows_and_ends_where_one_has_no_rows_of_its_own() -> None:
    rows = torch.arange(12, dtype=torch.float64).square()
    whole = total(rows, spread=True, count=12)
    one, other = total(rows[:5], spread=True, count=5), total(rows[5:], spread=True, count=7)
    one.merge(other)
    assert one.read().error is not None and one.read().error == pytest.approx(whole.read().error, rel=1e-13)
    one.merge(total(torch.tensor(1.0), spread=True, count=4))
    assert one.read().error is None


def test_what_the_host_sums_is_added_too() -> None:
    one, other = Total(), Total()
    one.add(2.0, 3)
    other.add(5.0, 1)
    other.add_sum(1, torch.tensor(1))
    one.merge(other)
    assert (one.value, one.read().count) == (12 / 5, 5)


# --- scores


def test_scores_refuse_others_of_another_shape() -> None:
    one, other = R2(), R2()
    one.update(torch.zeros(2, 1), torch.ones(2, 1))
    other.update(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(SettingError, match="3 after 1"):
        one.merge(other)
    two, three = F1(), F1()
    two.update(torch.zeros(2, 2), torch.ones(2).long())
    three.update(torch.zeros(2, 3), torch.ones(2).long())
    with pytest.raises(SettingError, match="3 classes"):
        two.merge(three)


@pytest.mark.parametrize("make", [R2, RMSE, F1])
def test_a_score_that_saw_nothing_takes_over_the_others_and_leaves_it_alone(make: Any) -> None:
    output, target = torch.tensor([0.1, 2.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    one, other = make(), make()
    other.update(output, target)
    wanted = float(other.compute())
    one.merge(other)
    other.merge(make())
    one.update(output + 1, target)
    assert float(other.compute()) == wanted
    whole = make()
    whole.update(torch.cat([output, output + 1]), torch.cat([target, target]))
    assert float(one.compute()) == pytest.approx(float(whole.compute()), rel=1e-12)


def test_a_nan_on_one_process_shows_in_every_score() -> None:
    good, bad = torch.tensor([0.1, 2.0]), torch.tensor([math.nan, 1.0])
    for make in (R2, RMSE, F1):
        one, other = make(), make()
        one.update(good, torch.tensor([0.0, 1.0]))
        other.update(bad, torch.tensor([0.0, 1.0]))
        one.merge(other)
        assert math.isnan(float(one.compute()))


# --- objects that say how their states add up, as torchmetrics' do


def dim_zero_sum(values: Tensor) -> Tensor:
    return values.sum(0)


def dim_zero_max(values: Tensor) -> Tensor:
    return values.max(0).values


def dim_zero_cat(values: Any) -> Tensor:
    return torch.cat(values)


def dim_zero_mean(values: Tensor) -> Tensor:
    return values.mean(0)


class Stated(nn.Module):
    """Has states with rules, and would add them up itself in `compute`."""

    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self._reductions = rules
        self.sync_on_compute = self._to_sync = True
        self._computed: Any = None
        self._update_count = 0
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        self._computed, self._update_count = None, self._update_count + 1
        for name, rule in self._reductions.items():
            value = getattr(self, name)
            if isinstance(value, list):
                value.append(output)
            elif rule is dim_zero_max:
                setattr(self, name, torch.maximum(value, output.max()))
            else:
                setattr(self, name, value + output.sum())

    def compute(self) -> float:
        assert not self._to_sync, "it adds up over processes by itself"
        assert self._update_count
        if self._computed is None:
            rows = [torch.cat(value) if isinstance(value, list) else value for value in self.states()]
            self._computed = sum(float(value.sum()) for value in rows)
        return self._computed

    def states(self) -> list[Any]:
        return [getattr(self, name) for name in self._reductions]

    def reset(self) -> None:
        self._update_count, self._computed = 0, None
        for name, rule in self._reductions.items():
            setattr(self, name, [] if rule in (dim_zero_cat, None) else torch.zeros(()))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(zip(self._reductions, self.states(), strict=True))

    def load_state_dict(self, tree: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in tree.items():
            setattr(self, name, value)


def test_states_are_added_up_by_their_own_rules_once() -> None:
    rules = {"total": dim_zero_sum, "most": dim_zero_max, "rows": dim_zero_cat, "raw": None}
    first, second, third = (MetricSet({"stated": Stated(**rules)}) for _ in range(3))
    first.update(torch.tensor([1.0, 2.0]), torch.zeros(2), 2)
    second.update(torch.tensor([5.0]), torch.zeros(1), 1)
    second.update(torch.tensor([3.0]), torch.zeros(1), 1)
    for each in (first, second, third):
        each.check_mergeable()
    first.compute()  # keeps what it computed
    first.merge(second.state_dict())
    first.merge(third.state_dict())
    assert first.compute()["stated"] == 11 + 5 + 11 + 11
    third.merge(second.state_dict())  # has seen nothing itself
    assert third.compute()["stated"] == 8 + 5 + 8 + 8


class Wrapping(Stated):
    def __init__(self) -> None:
        super().__init__(total=dim_zero_sum)
        self.inner = Stated(total=dim_zero_sum)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Stated(mean=dim_zero_mean), "state 'mean' of dist_reduce_fx='mean'"),
        (Stated, "has no states"),
        (Wrapping, "is made of other metrics"),
    ],
)
def test_states_that_do_not_add_up_exactly_are_refused(make: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why) as caught:
        MetricSet({"stated": make()}).check_mergeable()
    assert "def merge(self, other): ..." in str(caught.value)


def test_a_merge_of_ones_own_comes_first() -> None:
    class Own(Stated):
        def merge(self, other: Own) -> None:
            self.mean = self.mean + 2 * other.mean

    own = ObjectMetric("own", Own(mean=dim_zero_mean))
    own.metric.mean = torch.tensor(1.0)
    own.check_mergeable()
    own.merge({"mean": torch.tensor(2.0)})
    assert own.metric.mean == 5.0
