"""What of an update lies on the device where no host waits for it: loss scale, verdict, clock and rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.async_reads import AHEAD
from trainwright.core.device import widest_float
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.table import TableRates
from trainwright.update.nonfinite_policy import Policy

ROWS = 512
"""Rows of a table of rates that lie on the device at a time."""


class DeviceScale:
    """A loss scale that is adapted on the device; its values are those of `LossScaler` on the host."""

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self._host = scaler
        self.settings = scaler.settings
        self._scale = torch.zeros((), dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._send()

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the scale, in float32 at least."""
        return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * self._scale

    def factor(self) -> Any:
        """Return what scaled gradients are multiplied by to unscale them, a 0-dim tensor."""
        return self._scale.to(widest_float(self._scale.device)).reciprocal()

    def adapt(self, overflowed: Any) -> None:
        """Lower the scale where the 0-dim tensor `overflowed` is 1; else raise it after enough updates without one."""
        settings = self.settings
        torch._amp_update_scale_(
            self._scale,
            self._good,
            overflowed,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
        )
        self._scale.clamp_(min=settings.min_scale)

    @property
    def at_floor(self) -> Any:
        """1.0 where the scale cannot be lowered any more, a 0-dim tensor."""
        return (self._scale <= self.settings.min_scale).float()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; read from the device, between two updates."""
        scale, good = host_reads.read([self._scale, self._good])
        self._host.load_state_dict({"scale": scale, "good": good})
        return self._host.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved scale."""
        self._host.load_state_dict(tree)
        self._send()

    @property
    def value(self) -> float:
        """The scale; read from the device."""
        return float(self.state_dict()["scale"])

    def _send(self) -> None:
        state = self._host.state_dict()
        self._scale.fill_(state["scale"])
        self._good.fill_(state["good"])


class DeviceJudge:
    """The policy for numbers that are not finite, in a few tensors: no host has to know what became of an update.

    It is `slots.on_nonfinite.judge` in arithmetic of zeros and ones.
    """

    def __init__(self, policy: Policy, device: torch.device, scale: DeviceScale | None) -> None:
        self._policy, self._scale = policy, scale
        self.held_back = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 where the update in hand is held back: what the kernels heed."""
        self.ends = torch.zeros((), dtype=torch.float32, device=device)
        """1.0 from the update on that ends the run."""
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        """Updates of this stage that were applied."""

    def judge(self, gradient: Tensor, loss: Tensor) -> None:
        """Take the flags of an update, 1.0 where its gradient, or its loss, is not finite."""
        if self._scale is None:
            own = gradient if self._policy == "ignore" else torch.maximum(gradient, loss)
            overflow = torch.zeros_like(gradient)
        else:
            # An overflow of a scaled gradient under a finite loss belongs to the scale, unless that is at its floor.
            overflow = gradient * (1.0 - loss) * (1.0 - self._scale.at_floor)
            own = torch.maximum(gradient, loss) * (1.0 - overflow)
            self._scale.adapt(gradient)
        if self._policy == "raise":
            self.ends.copy_(torch.maximum(self.ends, own))
            self.held_back.copy_(torch.maximum(overflow, self.ends))
        elif self._policy == "skip":
            self.held_back.copy_(torch.maximum(overflow, own))
        else:
            self.held_back.copy_(overflow)

    def count(self) -> None:
        """Let the clock tick, where the update in hand is applied."""
        self.clock.add_((self.held_back == 0).to(torch.int64))

    def set_clock(self, updates: int) -> None:
        """Set the clock to what the host knows, and forget what ended a run."""
        self.clock.fill_(updates)
        self.ends.zero_()
        self.held_back.zero_()


class DeviceRates:
    """The rates of a schedule as a table on the device, read at the clock that lies there."""

    def __init__(self, rates: TableRates, device: torch.device) -> None:
        self._rates, self._device = rates, device
        self._table = torch.zeros(0, 0, device=device)
        self._version = rates.version
        self._begin: int | None = None
        """The first row of the table, as the host knows it; None where it was not sent yet."""
        self._first = torch.zeros((), dtype=torch.int64, device=device)

    def meet(self, groups: int) -> None:
        """Take over how many groups there are; with others the table is sent anew when it is needed next."""
        if self._table.shape[1] != groups:
            self._table, self._begin = torch.zeros(ROWS, groups, dtype=torch.float32, device=self._device), None

    def of(self, updates: int) -> list[float]:
        """The rates of the update that follows `updates` applied ones, on the host."""
        return self._rates.at(updates)

    def reach(self, known: int) -> None:
        """Have the table hold the rates of the update to come; `known`: updates that the host knows to be applied."""
        # The clock is not further than what is under way.
        stale = self._version != self._rates.version
        if stale or self._begin is None or not self._begin <= known < self._begin + ROWS - AHEAD:
            self._send(known)

    def at(self, clock: Tensor) -> list[Tensor]:
        """The rate of each group at the clock."""
        row = (clock - self._first).reshape(1)
        return list(self._table.index_select(0, row).reshape(-1).unbind())

    def _send(self, first: int) -> None:
        """Send the rows from `first` on, to where those before them lay."""
        table = torch.tensor([self._rates.at(first + row) for row in range(ROWS)], dtype=torch.float32)
        if self._device.type == "cuda":
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)
        self._first.fill_(first)
        self._begin, self._version = first, self._rates.version
