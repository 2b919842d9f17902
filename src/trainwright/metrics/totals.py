"""A count-weighted mean in the making: exact sums and counts that stay where the tensors are until they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainwright.core.checks import check_form, is_flag, is_number
from trainwright.core.device import widest_float
from trainwright.core.errors import SettingError
from trainwright.core.host_reads import host_value, read
from trainwright.core.records import Count, MeanLoss, SumLoss

_HALF = 2**20  # splits an int64 into two numbers that float32 holds exactly


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a `Total` on the host."""

    value: float
    """Sum / count; NaN over nothing."""
    count: float
    """The denominator; a whole number unless a fractional count was added."""
    error: float | None
    """Standard error sqrt(variance / count), population variance over rows; None without one value per row."""


class Total:
    """The sum and the count of one mean.

    Sums of floats are float64, sums of whole numbers int64; two float32 where the device has no float64 (`wide=False`,
    the default on mps). Adding never waits for a device. A term whose count is zero is masked, so that the NaN of an
    empty batch does not enter; a NaN that counts stays. With `spread=True` squares are summed too, for `error`.
    """

    def __init__(self, *, spread: bool = False, wide: bool | None = None) -> None:
        self._spread = spread
        self._by_row = True  # every number so far was one of a row
        self._sums = {name: _RunningSum(wide) for name in ("sum", "count", "squares")}
        self._sum, self._count, self._squares = self._sums.values()

    def add(self, value: float | Tensor, count: Count) -> None:
        """Add one number that is a mean over `count` things; a tensor has one element, on any device."""
        if isinstance(count, Tensor):
            self.add_sum(_product(value, count), count)
        elif not count:
            return
        elif isinstance(value, Tensor):
            self._by_row = False
            self._count.host += count
            self._sum.add(_scalar(value), count)
        else:
            self.add_sum(value * count, count)

    def add_sum(self, total: float | Tensor, count: Count) -> None:
        """Add a sum over `count` things, or a 1-dim tensor of such sums, with one count or a count or mask for each."""
        if isinstance(count, Tensor):
            count = count.detach() if count.requires_grad else count
            count = count.to(total.device) if isinstance(total, Tensor) else count
            if not isinstance(total, Tensor) or total.is_floating_point():  # NaN over nothing does not enter
                total = torch.where(count != 0, total, 0)
            self._count.add(count)
        elif not count:
            return
        else:
            self._count.host += count
        if not isinstance(total, Tensor):
            self._by_row = False
            self._sum.host += total
            return
        total = total.detach() if total.requires_grad else total
        self._sum.add(total)
        if self._spread:
            self._add_squares(total, count)

    def take(self, result: Any, rows: int, name: str = "a number") -> None:
        """Add anything that a metric function may return over `rows` rows.

        That is: one number (a mean over the rows), a 1-dim tensor with one value per row, `MeanLoss`, or `SumLoss`.
        """
        if isinstance(result, SumLoss):
            count = rows if result.count is None else result.count
            _check_shapes(result.total, count, name)
            self.add_sum(result.total, count)
        elif isinstance(result, MeanLoss):
            _check_one(result.loss, rows, name)
            _check_one(result.count, rows, f"the count of {name}")
            self.add(result.loss, result.count)
        elif isinstance(result, Tensor) and result.shape == (rows,):
            self.add_sum(result, rows)
        else:
            _check_one(result, rows, name)
            self.add(result if isinstance(result, Tensor) else float(result), rows)

    @property
    def value(self) -> float:
        """Sum / count, read now; NaN over nothing."""
        return self.read().value

    @property
    def count(self) -> float:
        """The count, read now."""
        return self.read().count

    @property
    def error(self) -> float | None:
        """The standard error over rows, read now; None without `spread` or without one value per row."""
        return self.read().error

    def read(self) -> Reading:
        """Return value, count and error in one read."""
        return read_totals({"": self})[""]

    def tensors(self) -> list[Tensor]:
        """Return the scalars on the device that `reading` needs as numbers."""
        return [tensor for running in self._sums.values() for tensor in running.tensors()]

    def reading(self, numbers: list[float]) -> Reading:
        """Return value, count and error, given `tensors` as numbers."""
        left = iter(numbers)
        total, count, squares = (
            sum(next(left) for _ in running.tensors()) + running.host for running in self._sums.values()
        )
        if not count:
            return Reading(math.nan, count, None)
        mean, error = total / count, None
        if self._spread and self._by_row:
            variance = squares / count - mean * mean
            error = math.sqrt(max(variance, 0.0) / count)
        return Reading(mean, count, error)

    def reset(self) -> None:
        """Start again at zero, in the same memory."""
        self._by_row = True
        for running in self._sums.values():
            running.reset()

    def merge(self, other: Total) -> None:
        """Add another total, which may lie on another device; whole numbers stay exact."""
        self._by_row = self._by_row and other._by_row
        for name, running in self._sums.items():
            running.merge(other._sums[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, each as the number on the host and copies of the scalars on the device."""
        return {"by_row": self._by_row, **{name: running.state_dict() for name, running in self._sums.items()}}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load saved sums; scalars move to the device of the next term."""
        check_form(tree, by_row=is_flag, **dict.fromkeys(self._sums, _is_running_sum))
        self._by_row = tree["by_row"]
        for name, running in self._sums.items():
            running.load_state_dict(tree[name])

    def _add_squares(self, values: Tensor, count: Count) -> None:
        masked = isinstance(count, Tensor) and count.dtype is torch.bool
        if values.dim() != 1 or not (masked or (not isinstance(count, Tensor) and count == len(values))):
            self._by_row = False
            return
        flags = values.dtype is torch.bool
        self._squares.add(values if flags else _widest(values).square())


def read_totals(totals: Mapping[str, Total]) -> dict[str, Reading]:
    """Return the reading of every total, with one read for all of them."""
    tensors = {name: total.tensors() for name, total in totals.items()}
    numbers = read([tensor for some in tensors.values() for tensor in some])
    readings, start = {}, 0
    for name, total in totals.items():
        end = start + len(tensors[name])
        readings[name] = total.reading(numbers[start:end])
        start = end
    return readings


class _RunningSum:
    """One sum: a number on the host for terms of the CPU, and a scalar on the device for terms of an accelerator.

    `low` holds what float32 rounds off where the device has no float64. With `wide` given, CPU tensors are summed as
    on an accelerator with or without float64.
    """

    __slots__ = ("high", "host", "low", "wide")

    def __init__(self, wide: bool | None) -> None:
        self.host: float = 0
        self.high: Tensor | None = None
        self.low: Tensor | None = None
        self.wide = wide

    def add(self, term: Tensor, times: float = 1) -> None:
        """Add `times` x the sum of `term`, a scalar or a 1-dim tensor, in place."""
        if term.dim():
            # To count flags takes a quarter of the time that their sum takes on the CPU.
            term = term.count_nonzero() if term.dtype is torch.bool else _widest(term).sum()
        if term.is_cpu and self.wide is None:
            self.host += host_value(term) * times  # Python's float is a float64, its int has no end
        else:
            self._add_on_device(term, times)

    def _add_on_device(self, term: Tensor, times: float = 1) -> None:
        """Add `times` x a scalar to the scalar on its device."""
        floating = term.is_floating_point() or type(times) is float
        high = self.high
        if high is None or high.device != term.device or (floating and not high.is_floating_point()):
            high = self._prepared(term.device, floating)
        if self.low is None:
            high.add_(term, alpha=times)
            return
        # Knuth's TwoSum: `total + rest` is exactly `high + narrow`.
        narrow = term.to(torch.float32) * times
        total = high + narrow
        taken = total - high
        rest = (high - (total - taken)) + (narrow - taken)
        high.copy_(total)
        self.low.add_(rest.nan_to_num_(0.0, 0.0, 0.0))  # an infinite sum has no rest

    def merge(self, other: _RunningSum) -> None:
        """Add another sum, of any kind and from any device."""
        self.host += other.host
        for part in other._device_state():
            if self.high is None:
                self._load_device(other._device_state())
                return
            device = self.high.device
            if not part.is_floating_point() and not self.high.is_floating_point():
                self._add_on_device(part.to(device))
                continue
            kind = torch.float64 if self._is_wide(device) else torch.float32
            for exact in (piece.double() for piece in _pieces(part.cpu())):
                near = exact.to(kind)
                self._add_on_device(near.to(device))
                self._add_on_device((exact - near).nan_to_num_(0.0, 0.0, 0.0).to(device, kind))

    def tensors(self) -> list[Tensor]:
        """Return scalars whose sum is the part on the device."""
        if self.high is None:
            return []
        if self.low is not None:
            return [self.high, self.low]
        if self.high.is_floating_point() or self._is_wide(self.high.device):
            return [self.high]
        return _pieces(self.high)

    def reset(self) -> None:
        self.host = 0
        for tensor in (self.high, self.low):
            if tensor is not None:
                tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"host": self.host, "device": self._device_state()}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self.host = tree["host"]
        self._load_device(tree["device"])

    def _device_state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (self.high, self.low) if tensor is not None]

    def _load_device(self, tensors: list[Tensor]) -> None:
        self.high, self.low = (*(tensor.clone() for tensor in tensors), None, None)[:2]

    def _prepared(self, device: torch.device, floating: bool) -> Tensor:
        """Create the scalar, or move it to `device`, or turn one of whole numbers into one of floats."""
        wide = self._is_wide(device)
        whole = not floating and (self.high is None or not self.high.is_floating_point())
        kind = torch.int64 if whole else torch.float64 if wide else torch.float32
        before = [] if self.high is None else self.tensors()
        self.high = torch.zeros((), dtype=kind, device=device)
        self.low = None if wide or whole else torch.zeros((), dtype=kind, device=device)
        for part in before:
            exact = part if part.device == device else part.cpu()
            near = exact.to(kind)
            rest = (exact - near).nan_to_num_(0.0, 0.0, 0.0).to(kind)  # 0 unless float64 is made narrow
            self._add_on_device(near.to(device))
            self._add_on_device(rest.to(device))
        return self.high

    def _is_wide(self, device: torch.device) -> bool:
        return device.type != "mps" if self.wide is None else self.wide


def _pieces(number: Tensor) -> list[Tensor]:
    """Return floats whose sum is a whole number exactly; a fraction as it is."""
    if number.is_floating_point():
        return [number]
    rest = number % _HALF
    return [number - rest, rest]


def _widest(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64)
    return values.to(widest_float(values.device))


def _product(value: float | Tensor, count: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return _detached(count).to(widest_float(count.device)) * value
    value = _scalar(value)
    return value.to(widest_float(value.device)) * _detached(count).to(value.device).reshape(())


def _scalar(value: Tensor) -> Tensor:
    return _detached(value).reshape(()) if value.dim() else _detached(value)


def _detached(value: Tensor) -> Tensor:
    """Return the tensor without its graph; one that has none as it is, which saves an operation."""
    return value.detach() if value.requires_grad else value


def _check_one(result: Any, rows: int, name: str) -> None:
    if (isinstance(result, Tensor) and result.numel() == 1 and result.dim() < 2) or isinstance(result, Real):
        return
    fix = "return (output - target).abs().mean(1)   # one value per row"
    if callable(result):
        fix = f"{name} is a function that makes the function: call it, as in top_k(5)"
    raise SettingError(
        f"{name} is {_shown(result)}, for a batch of {rows} rows",
        want="a number (a mean over the rows), a 1-dim tensor with one value per row, "
        "MeanLoss(value, count) or SumLoss(total, count)",
        fix=fix,
    )


def _check_shapes(total: Any, count: Any, name: str) -> None:
    shape = total.shape if isinstance(total, Tensor) else ()
    if len(shape) < 2 and (not isinstance(count, Tensor) or count.shape in ((), shape)):
        return
    raise SettingError(
        f"{name} is a SumLoss of total {_shown(total)} and count {_shown(count)}",
        want="two numbers, or two 1-dim tensors of one length",
        fix="SumLoss(total.sum(), count.sum())",
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _is_running_sum(value: object) -> bool:
    """Whether a value is the state of a running sum: a number, and up to two scalar tensors."""
    if not isinstance(value, dict) or value.keys() != {"host", "device"} or not is_number(value["host"]):
        return False
    device = value["device"]
    return (
        isinstance(device, list)
        and len(device) <= 2
        and all(isinstance(one, Tensor) and not one.dim() for one in device)
    )
