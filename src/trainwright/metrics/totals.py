"""Running totals that stay on the device: exact sums and counts, read back only when somebody asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core.checks import check_form, is_flag, is_number
from trainwright.core.device import widest_float
from trainwright.core.errors import SettingError
from trainwright.core.host_reads import read
from trainwright.core.records import Count, MeanLoss, SumLoss
from trainwright.metrics.flags import Hits

if TYPE_CHECKING:
    from trainwright.metrics.flags import Flags

_HALF = 2**20  # splits an int64 into two numbers that float32 holds exactly


@dataclass(frozen=True, slots=True)
class Reading:
    """What a `Total` amounts to, read back."""

    value: float
    """Sum / count; NaN where nothing was counted."""
    count: float
    """What the mean is a mean over; a whole number unless a fractional count was added."""
    error: float | None
    """Standard error sqrt(variance / count), population variance over rows; None where rows were not given singly."""


class Total:
    """A count-weighted mean in the making.

    Sums of floats are float64, of whole numbers int64; where the device has no float64 (`wide=False`, by default on
    mps), two float32. Adding reads nothing back: a count of zero on the device is masked there, so that the NaN of
    an empty batch does not enter; a NaN that counts stays. With `spread=True` squares are summed too, for `error`.
    """

    def __init__(self, *, spread: bool = False, wide: bool | None = None) -> None:
        self._spread = spread
        self._host_sum: float = 0
        self._host_count: float = 0
        self._by_row = True  # every number so far was one of a row
        self._flags: Flags | None = None
        self._sums = {name: _Running(wide) for name in ("sum", "count", "squares")}
        self._sum, self._count, self._squares = self._sums.values()

    def add(self, value: float | Tensor, count: Count) -> None:
        """Add one number that is a mean over `count` things; a tensor has one element, on any device."""
        if isinstance(count, Tensor):
            self.add_sum(_product(value, count), count)
        elif not count:
            return
        elif isinstance(value, Tensor):
            self._by_row = False
            self._host_count += count
            self._sum.add(_scalar(value), count)
        else:
            self.add_sum(value * count, count)

    def add_sum(self, total: float | Tensor, count: Count) -> None:
        """Add a sum over `count` things, or a 1-dim tensor of such sums, with one count or a count or mask for each."""
        if isinstance(count, Tensor):
            count = _bare(count).to(total.device) if isinstance(total, Tensor) else _bare(count)
            total = torch.where(count != 0, total, 0) if _may_be_nan(total) else total
            self._count.add(_folded(count))
        elif not count:
            return
        else:
            self._host_count += count
        if not isinstance(total, Tensor):
            self._by_row = False
            self._host_sum += total
            return
        total = _bare(total)
        self._sum.add(_folded(total))
        if self._spread:
            self._add_squares(total, count)

    def take(self, result: Any, rows: int, name: str = "a number") -> None:
        """Add whatever a metric function may return or `log` may be given, over `rows` rows.

        That is: one number (a mean over the rows), a 1-dim tensor with one value per row, `MeanLoss`, or `SumLoss`.
        """
        if type(result) is Hits and result.on_host and not self._spread:  # what `accuracy` gives, nearly always
            right, counted = result.counted()
            self._host_sum += right
            self._host_count += counted
        elif isinstance(result, SumLoss):
            if not self._spread and self._add_flags(result):
                return
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
        """Sum / count, read back now; NaN where nothing was counted."""
        return self.read().value

    @property
    def count(self) -> float:
        """What was counted, read back now."""
        return self.read().count

    @property
    def error(self) -> float | None:
        """The standard error over rows, read back now; None without `spread` or without one value per row."""
        return self.read().error

    def read(self) -> Reading:
        """Everything at once."""
        return read_totals({"": self})[""]

    def tensors(self) -> list[Tensor]:
        """What must be read back for `reading`: scalars on the device."""
        self._count_flags()
        return [tensor for running in self._sums.values() for tensor in running.tensors()]

    def reading(self, numbers: list[float]) -> Reading:
        """What the total amounts to, given its `tensors` as numbers."""
        left = iter(numbers)
        total, count, squares = (sum(next(left) for _ in running.tensors()) for running in self._sums.values())
        total, count = total + self._host_sum, count + self._host_count
        if not count:
            return Reading(math.nan, count, None)
        mean, error = total / count, None
        if self._spread and self._by_row:
            variance = squares / count - mean * mean
            error = math.sqrt(max(variance, 0.0) / count)
        return Reading(mean, count, error)

    def reset(self) -> None:
        """Back to nothing, in the same memory."""
        self._host_sum = self._host_count = 0
        self._by_row = True
        self._flags = None
        for running in self._sums.values():
            running.reset()

    def merge(self, other: Total) -> None:
        """Take in all that another total has, which may lie elsewhere; whole numbers stay exact."""
        self._count_flags()
        other._count_flags()
        self._host_sum += other._host_sum
        self._host_count += other._host_count
        self._by_row = self._by_row and other._by_row
        for name, running in self._sums.items():
            running.merge(other._sums[name])

    def state_dict(self) -> dict[str, Any]:
        """The sums as they lie on the device, copied."""
        self._count_flags()
        sums = {name: running.state() for name, running in self._sums.items()}
        return {"host_sum": self._host_sum, "host_count": self._host_count, "by_row": self._by_row, **sums}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Take over saved sums; they move to the device of what is added next."""
        sums = dict.fromkeys(self._sums, _are_scalars)
        check_form(tree, host_sum=is_number, host_count=is_number, by_row=is_flag, **sums)
        self._host_sum, self._host_count = tree["host_sum"], tree["host_count"]
        self._by_row = tree["by_row"]
        self._flags = None
        for name, running in self._sums.items():
            running.load(tree[name])

    def _add_flags(self, given: SumLoss) -> bool:
        """Add a sum that is a yes or no per row; returns whether it is one."""
        if getattr(given.total, "dtype", None) is not torch.bool:
            return False
        from trainwright.metrics.flags import Flags, are_flags

        if not are_flags(given):
            return False
        self._flags = Flags() if self._flags is None else self._flags
        right, counted = self._flags.take(given)
        self._host_sum += right
        self._host_count += counted
        if self._flags.are_many:
            self._count_flags()
        return True

    def _count_flags(self) -> None:
        """Add the flags that wait."""
        if self._flags is not None:
            hits, counted = self._flags.close()
            if hits is not None:
                self._sum.add(hits)
            if counted is not None:
                self._count.add(counted)

    def _add_squares(self, values: Tensor, count: Count) -> None:
        masked = isinstance(count, Tensor) and count.dtype is torch.bool
        if values.dim() != 1 or not (masked or (not isinstance(count, Tensor) and count == len(values))):
            self._by_row = False
            return
        whole = values.dtype is torch.bool
        self._squares.add(_folded(values if whole else _widest(values).square()))


def read_totals(totals: Mapping[str, Total]) -> dict[str, Reading]:
    """Return the reading of every total, with a single read back of all together."""
    tensors = {name: total.tensors() for name, total in totals.items()}
    numbers = read([tensor for some in tensors.values() for tensor in some])
    readings, start = {}, 0
    for name, total in totals.items():
        end = start + len(tensors[name])
        readings[name] = total.reading(numbers[start:end])
        start = end
    return readings


class _Running:
    """One running sum: a scalar on the device of what is added, and what float32 rounded off where it is narrow."""

    __slots__ = ("high", "low", "wide")

    def __init__(self, wide: bool | None) -> None:
        self.high: Tensor | None = None
        self.low: Tensor | None = None
        self.wide = wide

    def add(self, term: Tensor, times: float = 1) -> None:
        """Add `times` x `term`, in place."""
        floating = term.is_floating_point() or type(times) is float
        high = self.high
        if high is None or high.device != term.device or (floating and not high.is_floating_point()):
            high = self._made_ready(term.device, floating)
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

    def merge(self, other: _Running) -> None:
        """Add another sum, of any kind and from any device."""
        for part in other.state():
            if self.high is None:
                self.load(other.state())
                return
            device = self.high.device
            if not part.is_floating_point() and not self.high.is_floating_point():
                self.add(part.to(device))
                continue
            kind = torch.float64 if self._is_wide(device) else torch.float32
            for exact in (piece.double() for piece in _pieces(part.cpu())):
                near = exact.to(kind)
                self.add(near.to(device))
                self.add((exact - near).nan_to_num_(0.0, 0.0, 0.0).to(device, kind))

    def tensors(self) -> list[Tensor]:
        """Scalars whose sum it is."""
        if self.high is None:
            return []
        if self.low is not None:
            return [self.high, self.low]
        if self.high.is_floating_point() or self._is_wide(self.high.device):
            return [self.high]
        return _pieces(self.high)

    def reset(self) -> None:
        for tensor in (self.high, self.low):
            if tensor is not None:
                tensor.zero_()

    def state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (self.high, self.low) if tensor is not None]

    def load(self, tensors: list[Tensor]) -> None:
        self.high, self.low = (*(tensor.clone() for tensor in tensors), None, None)[:2]

    def _made_ready(self, device: torch.device, floating: bool) -> Tensor:
        """Make the sum, or move it to `device`, or make one of whole numbers take fractions."""
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
            self.add(near.to(device))
            self.add(rest.to(device))
        return self.high

    def _is_wide(self, device: torch.device) -> bool:
        return device.type != "mps" if self.wide is None else self.wide


def _pieces(number: Tensor) -> list[Tensor]:
    """Return numbers whose sum a whole one is, and which floats hold exactly; a fraction as it is."""
    if number.is_floating_point():
        return [number]
    rest = number % _HALF
    return [number - rest, rest]


def _folded(values: Tensor) -> Tensor:
    """Return the sum of a 1-dim tensor, in the widest type of its kind; a scalar as it is."""
    if not values.dim():
        return values
    if values.dtype is torch.bool:
        return values.count_nonzero()  # on the CPU a quarter of the time of `sum`
    return _widest(values).sum()


def _widest(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64)
    return values.to(widest_float(values.device))


def _product(value: float | Tensor, count: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return _bare(count).to(widest_float(count.device)) * value
    value = _scalar(value)
    return value.to(widest_float(value.device)) * _bare(count).to(value.device).reshape(())


def _may_be_nan(total: float | Tensor) -> bool:
    return not isinstance(total, Tensor) or total.is_floating_point()


def _scalar(value: Tensor) -> Tensor:
    return _bare(value).reshape(()) if value.dim() else _bare(value)


def _bare(value: Tensor) -> Tensor:
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
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else () for part in (total, count)]
    if len(shapes[0]) < 2 and shapes[1] in ((), shapes[0]):
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


def _are_scalars(value: object) -> bool:
    """Whether a value is a list of one or two scalar tensors, or an empty one."""
    return (
        isinstance(value, list) and len(value) <= 2 and all(isinstance(one, Tensor) and not one.dim() for one in value)
    )
