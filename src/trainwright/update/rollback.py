"""Where a run stands, and what it takes to be again where the window in hand began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.checkpointing.state import Random
from trainwright.core.rng import random_state, set_random_state
from trainwright.core.trees import snapshot
from trainwright.fit.per_rank_state import opened
from trainwright.modules.modes import unnoticed
from trainwright.protocols import Source, Stateful, Tree
from trainwright.update.loss_tracker import Ledger
from trainwright.update.owner import Owner

BETWEEN, OPENING, FETCHING = "between", "opening", "fetching"
UPDATING, COUNTING, ENDED = "updating", "counting", "ended"
"""Between two windows all is whole; while the data of an epoch are opened, or a window is fetched, only random states
and the data have moved; while it is updated, what a forward pass moves too, and from the first step on the weights;
then it is counted, averaged, told. In the end the model is left with other weights."""


class Boundary:
    """Keeps what opening the data, and a window before its first step, may change, where a run may end inside."""

    def __init__(self, owner: Owner, source: Source, random: Random, *, ledger: Ledger) -> None:
        self.place = BETWEEN
        self._owner, self._source, self._random, self._ledger = owner, source, random, ledger
        self._keeps_all = owner.on_error == "save" and owner.world.size == 1  # several save nothing for an error
        self._keeps_random = owner.checkpoint is not None and (self._keeps_all or source.draws_global_rng)
        self._tell_source: Any = None if owner.checkpoint is None else getattr(source, "at_boundary", None)
        self._own: Mapping[str, Stateful] = {}
        self._modules = [module for module in (owner.model, owner.loss) if isinstance(module, nn.Module)]
        self._buffers: list[tuple[nn.Module, str, Tensor | None]] = []
        """The buffers by module and name: a forward may have put others in their place since."""
        self._kept: dict[str, Tree] = {}

    def bind(self, own: Mapping[str, Stateful]) -> None:
        """Take the user's own parts, which a window may change too."""
        self._own = own if self._keeps_all else {}

    def open_epoch(self) -> Iterator[Any]:
        """The iterator of the epoch in hand, at its batch; on resume every random state is what it was there."""
        counters, random = self._owner.counters, self._random
        loaded = random_state() if random.stands else random.loaded
        if self._owner.checkpoint is not None:
            random.kept = random_state() if loaded is None else loaded
            start = {} if loaded is None else random.epoch_start
            self._kept = {"data": snapshot(self._source.state_dict()), "epoch_start": start}
        self.place = OPENING  # a signal may end the run anywhere here: before this line `random` tells, then `kept`
        random.loaded, random.stands = None, False
        if loaded is None:
            iterator = opened(self._owner.world, self._source, counters.epoch)
            random.epoch_start = random.kept or {}
        else:
            set_random_state(random.epoch_start)
            iterator = opened(self._owner.world, self._source, counters.epoch, skip=counters.batch)
            set_random_state(loaded)
        self.place, self._kept = BETWEEN, {}
        return iterator

    def fetch(self) -> None:
        """Keep what is to be kept: the next window is about to be fetched."""
        if self._tell_source is not None:
            self._tell_source()
        self._random.kept = random_state() if self._keeps_random else None
        if self._keeps_all:
            inner = (module for root in self._modules for module in root.modules())
            self._buffers = [(module, name, one) for module in inner for name, one in module._buffers.items()]
            self._kept = {
                "buffers": [None if one is None else one.detach().clone() for _, _, one in self._buffers],
                "totals": snapshot(self._ledger.state_dict()),
                "state": snapshot(self._owner.state),
                "own": {name: snapshot(part.state_dict()) for name, part in self._own.items()},
            }
        self.place = FETCHING  # last: a handler of the user's own may raise at any line before

    def put_back(self) -> dict[str, Tree]:
        """Go back to where the window in hand began; return the states of other parts as they were there."""
        self._random.uses_kept = self.place in (OPENING, FETCHING, UPDATING)
        if self.place == OPENING:
            self._random.epoch_start = self._kept["epoch_start"]
            return {"data": self._kept["data"]}
        if self.place != UPDATING:
            return {}
        self._put_back_buffers()
        self._ledger.begin_at(self._kept["totals"])
        self._owner.state.clear()
        self._owner.state.update(self._kept["state"])
        own: dict[str, Tree] = self._kept["own"]
        return own

    def _put_back_buffers(self) -> None:
        with unnoticed(one for _, _, one in self._buffers if one is not None), torch.no_grad():
            for (module, name, buffer), kept in zip(self._buffers, self._kept["buffers"], strict=True):
                if isinstance(module._buffers, dict):  # a compiled script has others, which stay in their place
                    module._buffers[name] = buffer
                if buffer is not None:
                    buffer.copy_(kept)
