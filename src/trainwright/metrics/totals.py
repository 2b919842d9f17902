"""Sum and count of one mean: exact, and kept on the device of the terms until they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainwright.core.device import widest_float
from trainwright.core.errors import SettingError
from trainwright.core.host_reads import host_value, read
from trainwright.core.records import Count, MeanLoss, SumLoss

SUM, COUNT, SQUARES, OTHERS = range(4)
"""Indices of the four sums of a `Total`; `OTHERS` counts the terms that are not one value per row."""
ON_DEVICE = 3
"""The number of sums on a device; `OTHERS` is counted on the host."""

_SPLIT = 2**20  # splits an int64 into two numbers that float32 represents exactly


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a `Total` on the host."""

    value: float
    """Sum / count; NaN for a count of zero."""
    count: float
    """The denominator; an integer unless a fractional count was added."""
    error: float | None
    """Standard error sqrt(variance / count), with the population variance over rows; None without row values."""


class Total:
    """Sum and count of one mean.

    Terms on the CPU are added to Python floats, which are float64. Terms on an accelerator are added there, in float64,
    or in a pair of float32 on devices without float64 (`wide=False`, the default on mps). Adding never waits for a
    device. Terms with a count of zero are masked, so that the NaN of an empty batch is ignored; any other NaN is kept.
    With `spread=True`, squares are summed too, for the standard error. `label`: the name in error messages.
    """

    def __init__(self, label: str = "a number", *, spread: bool = False, wide: bool | None = None) -> None:
        self._label, self._spread, self._wide = label, spread, wide
        self._host: list[float] = [0, 0, 0, 0]
        self._device: _DeviceSums | None = None

    def take(self, result: Any, rows: int) -> None:
        """Add the result of a metric function for a batch of `rows` rows.

        `result`: one number (a mean over the rows), a 1-dim tensor with one value per row, `MeanLoss` or `SumLoss`.
        """
        if isinstance(result, SumLoss):
            count = rows if result.count is None else result.count
            _check_shapes(result.total, count, self._label)
            self.add_sum(result.total, count)
        elif isinstance(result, MeanLoss):
            _check_one(result.loss, rows, self._label)
            _check_one(result.count, rows, f"the count of {self._label}")
            self.add(result.loss, result.count)
        elif isinstance(result, Tensor) and result.shape == (rows,):
            self.add_sum(result, rows)
        else:
            _check_one(result, rows, self._label)
            self.add(result if isinstance(result, Tensor) else float(result), rows)

    def add(self, value: float | Tensor, count: Count) -> None:
        """Add a mean with its count; a tensor has one element, on any device."""
        if isinstance(count, Tensor):
            self.add_sum(_product(value, count), count)
        elif count and isinstance(value, Tensor):
            self._host[OTHERS] += 1
            self._host[COUNT] += count
            self._add(SUM, value.reshape(()) if value.dim() else value, count)
        elif count:
            self.add_sum(value * count, count)

    def add_sum(self, total: float | Tensor, count: Count) -> None:
        """Add a sum with its count, or a 1-dim tensor of sums with one count, or with a count or mask for each."""
        if isinstance(count, Tensor):
            count = count.to(total.device) if isinstance(total, Tensor) else count
            if not isinstance(total, Tensor) or total.is_floating_point():
                total = torch.where(count != 0, total, 0)
            self._add(COUNT, count)
        elif count:
            self._host[COUNT] += count
        else:
            return
        if isinstance(total, Tensor):
            self._add(SUM, total)
            if self._spread:
                self._add_squares(total, count)
        else:
            self._host[OTHERS] += 1
            self._host[SUM] += total

    @property
    def value(self) -> float:
        """Sum / count, read from the device; NaN for a count of zero."""
        return self.read().value

    def read(self) -> Reading:
        """Return value, count and error, by one read from the device."""
        return read_totals({"": self})[""]

    def scalars(self) -> list[Tensor]:
        """Return the device tensors whose values `reading` needs."""
        return [] if self._device is None else self._device.scalars

    def reading(self, numbers: list[float]) -> Reading:
        """Return value, count and error, given the values of `scalars`."""
        total, count, squares, others = self._sums(numbers)
        if not count:
            return Reading(math.nan, count, None)
        mean, error = total / count, None
        if self._spread and not others:
            error = math.sqrt(max(squares / count - mean * mean, 0.0) / count)
        return Reading(mean, count, error)

    def reset(self) -> None:
        """Set the sums to zero, in the same memory."""
        self._host = [0, 0, 0, 0]
        if self._device is not None:
            self._device.zero()

    def merge(self, other: Total) -> None:
        """Add another total, which may be on another device; reads it."""
        self._host = [own + more for own, more in zip(self._host, other._sums(read(other.scalars())), strict=True)]

    def state_dict(self) -> list[Tensor]:
        """Return tensors whose total is the sums: those on the host, then copies of those on the device."""
        host = torch.tensor(self._host, dtype=torch.float64)
        return [host] if self._device is None else [host, *(part.clone() for part in self._device.parts)]

    def load_state_dict(self, state: list[Tensor]) -> None:
        """Load saved sums."""
        host, *parts = state
        total, count, squares, others = host.tolist()
        self._host = [total, count, squares, others]
        self._device = _DeviceSums([part.clone() for part in parts]) if parts else None

    def _sums(self, numbers: list[float]) -> list[float]:
        """Return the four sums on the host, given the values of `scalars`."""
        sums = self._host.copy()
        for index, number in enumerate(numbers):
            sums[index % ON_DEVICE] += number
        return sums

    def _add(self, place: int, term: Tensor, times: float = 1) -> None:
        """Add `times` x the sum of `term`, a scalar or a 1-dim tensor, on the device of `term`."""
        if term.dim():
            # On the CPU, `count_nonzero` of flags takes a quarter of the time of their sum.
            term = term.count_nonzero() if term.dtype is torch.bool else _widest(term).sum()
        if term.is_cpu and self._wide is None:
            self._host[place] += host_value(term) * times
        else:
            self._sums_on(term.device).add(place, term.detach() if term.requires_grad else term, times)

    def _sums_on(self, device: torch.device) -> _DeviceSums:
        """Return the sums on a device; sums on another device are first read and added to those on the host."""
        if self._device is None or self._device.device != device:
            self._host = self._sums(read(self.scalars()))
            wide = device.type != "mps" if self._wide is None else self._wide
            kinds = [torch.float64] if wide else [torch.float32, torch.float32]
            self._device = _DeviceSums([torch.zeros(ON_DEVICE, dtype=kind, device=device) for kind in kinds])
        return self._device

    def _add_squares(self, values: Tensor, count: Count) -> None:
        masked = isinstance(count, Tensor) and count.dtype is torch.bool
        if values.dim() != 1 or not (masked or (not isinstance(count, Tensor) and count == len(values))):
            self._host[OTHERS] += 1
            return
        flags = values.dtype is torch.bool
        self._add(SQUARES, values if flags else _widest(values).square())


def read_totals(totals: Mapping[str, Total]) -> dict[str, Reading]:
    """Return the readings of all totals, by one read from the device."""
    scalars = {name: total.scalars() for name, total in totals.items()}
    numbers = iter(read([scalar for some in scalars.values() for scalar in some]))
    return {name: total.reading([next(numbers) for _ in scalars[name]]) for name, total in totals.items()}


class _DeviceSums:
    """Sum, count and squares on a device, in float64, or in float32 with a second tensor for the rounding errors."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts, self.device = parts, parts[0].device
        self.scalars = [scalar for part in parts for scalar in part.unbind()]

    def add(self, place: int, term: Tensor, times: float) -> None:
        """Add `times` x a scalar to one of the sums, in place."""
        if len(self.parts) == 1:
            self.scalars[place].add_(term, alpha=times)
        elif term.is_floating_point():
            self._add_narrow(place, term, times)
        else:
            rest = term.to(torch.int64) % _SPLIT
            self._add_narrow(place, term - rest, times)
            self._add_narrow(place, rest, times)

    def zero(self) -> None:
        """Set the sums to zero, in place."""
        for part in self.parts:
            part.zero_()

    def _add_narrow(self, place: int, term: Tensor, times: float) -> None:
        """Add by Knuth's TwoSum: `total + rest` is exactly `high + narrow`."""
        high, low = self.scalars[place], self.scalars[ON_DEVICE + place]
        narrow = term.to(torch.float32) * times
        total = high + narrow
        taken = total - high
        rest = (high - (total - taken)) + (narrow - taken)
        high.copy_(total)
        low.add_(rest.nan_to_num_(0.0, 0.0, 0.0))  # the rest of an infinite sum is NaN


def _widest(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64)
    return values.to(widest_float(values.device))


def _product(value: float | Tensor, count: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return count.to(widest_float(count.device)) * value
    return value.reshape(()).to(widest_float(value.device)) * count.to(value.device).reshape(())


def _check_one(result: Any, rows: int, label: str) -> None:
    if (isinstance(result, Tensor) and result.numel() == 1 and result.dim() < 2) or isinstance(result, Real):
        return
    fix = "return (output - target).abs().mean(1)   # one value per row"
    if callable(result):
        fix = f"{label} is a function that makes the function: call it, as in top_k(5)"
    raise SettingError(
        f"{label} is {form_of(result)}, for a batch of {rows} rows",
        want="a number (a mean over the rows), a 1-dim tensor with one value per row, "
        "MeanLoss(value, count) or SumLoss(total, count)",
        fix=fix,
    )


def _check_shapes(total: Any, count: Any, label: str) -> None:
    shape = total.shape if isinstance(total, Tensor) else ()
    if len(shape) < 2 and (not isinstance(count, Tensor) or count.shape in ((), shape)):
        return
    raise SettingError(
        f"{label} is a SumLoss of total {form_of(total)} and count {form_of(count)}",
        want="two numbers, or two 1-dim tensors of one length",
        fix="SumLoss(total.sum(), count.sum())",
    )


def form_of(value: Any) -> str:
    """Return the type of a value, or the shape of a tensor, as text for an error."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
