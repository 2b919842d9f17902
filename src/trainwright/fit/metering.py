"""Measures the speed of a run for the observers that ask for it, at pauses only: no update has a part in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core.errors import first_line
from trainwright.core.memory import device_memory
from trainwright.core.speed import Speed
from trainwright.core.trees import tensors_in
from trainwright.fit.due import Bell
from trainwright.modules.dtensors import is_sharded, local_shards
from trainwright.modules.flops import count_flops, peak_of
from trainwright.observers.throughput import Throughput
from trainwright.protocols import listeners
from trainwright.update import batches
from trainwright.update.owner import Owner, listening
from trainwright.update.window import find_rows

if TYPE_CHECKING:
    from trainwright.fit.run import Run


class Meter:
    """The speed that one `Throughput` asks for: the time between pauses, and what was done in it."""

    def __init__(self, asked: Throughput, run: Run) -> None:
        self._run, self._owner, self._asked = run, run.owner, asked
        self._bell = Bell(asked.span, run.counters, of="every")
        self._alone = run.agreement is None
        self._operations = Operations(asked, run.owner)
        self._on_speed = listeners(listening(run.owner), "on_speed")
        self._looks_at = torch.cuda.current_stream(run.owner.device) if run.owner.device.type == "cuda" else None
        self._held_in, self._sizes = -1, dict[str, int]()
        self._begin(run.counters.rows, run.counters.updates)
        self.go_on()

    def pause(self) -> None:
        """Stop the clock: what is done in a pause is no training. Looks whether the device has work left."""
        if self._looks_at is not None:
            self._looks += 1
            self._busy += not self._looks_at.query()  # asks, and waits for nothing
        self._seconds += time.perf_counter() - self._started
        self._waited += self._run.waited - self._waited_before

    def go_on(self) -> None:
        """Start the clock."""
        self._waited_before, self._started = self._run.waited, time.perf_counter()

    def next_update(self) -> float:
        """The update at which the loop must pause for it; several processes pause where all do, and not for one."""
        return self._bell.next_update(self._run.counters) if self._alone else float("inf")

    def tell(self, *, epoch_ended: bool) -> None:
        """Tell all observers, where its turn has come, where an epoch is over and where the run ends."""
        counters = self._run.counters
        rings = self._bell.rings(counters, epoch_ended=epoch_ended)
        if not (rings or epoch_ended or counters.stopped) or counters.rows == self._rows or not self._seconds:
            return
        flops, peak, note = self._operations.of(self._run.ledger.window)
        speed = Speed(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            seconds=self._seconds,
            rows=counters.rows - self._rows,
            updates=counters.updates - self._updates,
            waited=self._waited,
            flops_per_row=flops,
            peak=peak,
            looks=self._looks,
            busy=self._busy,
            memory=self._held(counters.epoch) | device_memory(self._owner.device),
            note=note,
        )
        self._begin(counters.rows, counters.updates)
        for notify in self._on_speed:
            notify(speed)

    def _held(self, epoch: int) -> dict[str, int]:
        """What the run holds, counted again in each epoch: it is walked through tensor by tensor."""
        if self._held_in != epoch:
            self._held_in, self._sizes = epoch, held_by(self._owner)
        return self._sizes

    def _begin(self, rows: int, updates: int) -> None:
        self._rows, self._updates = rows, updates
        self._seconds = self._waited = 0.0
        self._looks = self._busy = 0


class Operations:
    """What a row needs, and what the devices can do: asked once, when the first window has run."""

    def __init__(self, asked: Throughput, owner: Owner) -> None:
        self._asked, self._owner = asked, owner
        self._found: tuple[float | None, float | None, str] | None = None

    def of(self, window: Any) -> tuple[float | None, float | None, str]:
        """Operations per row, the peak of all devices, and why one of them is missing."""
        if self._found is None:
            self._found = self._find(window)
        return self._found

    def _find(self, window: Any) -> tuple[float | None, float | None, str]:
        asked, owner = self._asked, self._owner
        device = torch.cuda.get_device_name(owner.device) if owner.device.type == "cuda" else owner.device.type
        peak = asked.peak or peak_of(device)
        if peak is None:
            return asked.flops_per_row, None, f"the peak of {device} is not known: Throughput(peak=...)"
        peak *= owner.world.size
        if asked.flops_per_row is not None:
            return asked.flops_per_row, peak, ""
        unknown = _unknown(owner, window)
        if unknown:
            return None, peak, f"{unknown}: Throughput(flops_per_row=...)"
        try:
            return _counted(owner, window.batches[0]), peak, ""
        except Exception as error:  # the model's own, which may be any: it was not written for the meta device
            why = first_line(error, 80)
            return None, peak, f"the model does not run on the meta device ({why}): Throughput(flops_per_row=...)"


def meters_of(run: Run) -> list[Meter]:
    """A meter for each observer of the first process that asks for the speed."""
    return [Meter(one, run) for one in listening(run.owner) if isinstance(one, Throughput)]


def held_by(owner: Owner) -> dict[str, int]:
    """Bytes of what the run holds on this process, by kind."""
    parameters = list(owner.model.parameters())
    states = [state for one in owner.optimizers.values() for state in one.state.values()]
    return {
        "parameters": _size(parameters),
        "gradients": _size(p.grad for p in parameters if p.grad is not None),
        "optimizer": _size(tensors_in(states)),
        "buffers": _size(owner.model.buffers()),
    }


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of what lies on this process."""
    held = list(tensors)
    return sum(one.numel() * one.element_size() for one in (local_shards(held) if is_sharded(*held) else held))


def _unknown(owner: Owner, window: Any) -> str:
    """Why the operations of a row cannot be counted; "" where they can."""
    hooks = owner.hooks
    if hooks.steps_itself or hooks.computes_itself or hooks.updates_itself:
        return "how often steps of your own run a model is not known"
    if hooks.split is not batches.split:
        return "what a split of your own gives the model is not known"
    if window is None or not find_rows(window.batches[0]):
        return "no batch tells its rows"
    if is_sharded(*owner.model.parameters()):
        return "a model in shards cannot be copied without its numbers"
    return ""


def _counted(owner: Owner, batch: Any) -> float:
    """Operations of a row: the model's on one batch, forward and backward, by the rows of the batch."""
    inputs, _ = batches.split(batch) if owner.loss is not None else (batch, None)
    if isinstance(inputs, Mapping):
        flops = count_flops(owner.model, **inputs)
    else:
        flops = count_flops(owner.model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    rows = find_rows(batch)
    assert rows  # asked before
    return flops / rows
