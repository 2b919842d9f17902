"""One update of several processes: the step that each runs, and the gradients that all of them average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, StepError, message
from trainwright.core.records import Count
from trainwright.core.rng import unmoved
from trainwright.core.trees import parameters_in
from trainwright.distributed.ddp import Wrapped
from trainwright.distributed.gradient_averaging import Buckets, fingerprint
from trainwright.distributed.world import Group
from trainwright.modules.modes import running_statistics, unnoticed
from trainwright.update.loss_tracker import Roots
from trainwright.update.losses import StepLoss
from trainwright.update.owner import Owner
from trainwright.update.sharded_window import DealtWindow
from trainwright.update.window import weighed

_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class Spread:
    """What a process does together with others in an update; a run of one process has none.

    The default update runs the step under torch's DDP, which averages the gradients while `backward` goes on. An
    `update` of the user's own reads gradients in an order of its own: there nothing is wrapped, and they are averaged
    once they are whole. What a window counts, and its loss, travel with the gradients.
    """

    def __init__(self, owner: Owner) -> None:
        assert isinstance(owner.world, Group)
        self._owner, self._world, self._settings = owner, owner.world, owner.parallel
        self.shards: bool = self._settings.shards
        """Whether each process holds a part of the weights, so that every forward is one of all processes."""
        hooks = owner.hooks
        self.is_default = not (hooks.updates_itself or hooks.computes_itself)
        """Whether no code of the user's own reads or makes gradients."""
        self._wraps = self.is_default and not self.shards
        if not self._wraps and getattr(self._settings, "compress", None) is not None:
            what = f"DDP(compress={self._settings.compress!r}) beside an `update` of your own, which reads gradients"
            raise SettingError(message(what, want="gradients as they are", fix="DDP() without compress"))
        self._rides = self._wraps and self._settings.compress is None
        """Whether what is told travels with the gradients under DDP, which must not round it."""
        self._set_sync: Any = None
        if self.shards:
            from trainwright.distributed.fsdp import set_sync

            self._set_sync = set_sync
        self._module: _Step | None = None
        self._wrapped: Wrapped | None = None
        self._looks = False
        """Whether the window in hand, the first of an epoch, is to show anew which parameters are not used."""
        self._buckets: dict[tuple[int, ...], Buckets] = {}
        self._silenced: list[Any] = []
        """What has gradients be 0, while a batch that stands in runs backward."""
        self._seen: dict[int, tuple[int, int]] = {}
        """By parameter: what its gradient was when it was that of all processes."""
        self.loss: Count = 0.0
        """The loss of the window in hand over all processes."""
        self.counted: Count | None = None
        """What it is a mean over; None where it is a plain sum."""

    def plan(self) -> None:
        """Take what is trained as it is now: layers may come, be frozen or be set free, or be used no longer."""
        module, unused = _Step(self, self._owner), getattr(self._settings, "find_unused_parameters", "auto")
        if self._module is not None and self._module.layout == module.layout:
            all_used = self._wrapped is not None and not self._wrapped.unused
            self._looks = all_used and unused == "auto" and not self._settings.static_graph
            return
        self._module, self._wrapped, self._buckets, self._looks = module, None, {}, False
        if self._wraps and (unused != "auto" or self._settings.static_graph):
            self._wrapped = Wrapped(module, self._settings, self._world, unused=unused is True)

    def begin(self) -> None:
        """Start the next window: its gradients are new ones, wherever in memory they come to lie."""
        self.loss = 0.0
        self._seen.clear()
        self._silence(False)
        if getattr(self._settings, "sync_buffers", False):  # before any forward, which may save them for its backward
            self._world.align(self._owner.model.buffers())

    @property
    def in_step(self) -> bool:
        """Whether all run as many micro-batches: torch averages in each of them in a static graph's first window."""
        return self.shards or (self._wraps and self._settings.static_graph)

    def step(self, batch: Any) -> tuple[Tensor, ...]:
        """Run the step of the next micro-batch; return its loss, and the term that carries its count and value."""
        window = self._window
        if window.position < 0:
            self._begin()
        last = window.position + 2 == len(window.batches)
        self._silence(window.stands_in)
        if window.stands_in:
            with self._standing_in():
                return self._forward(batch, last=last)
        return self._forward(batch, last=last)

    def weigh(self, returned: tuple[Tensor, ...]) -> Roots:
        """Return the roots of `backward` and their gradients: the loss has its weight, the carried term has 1."""
        tracker = self._owner.ledger
        root = tracker.root_gradient(returned[0], self._weight)
        return returned, (root, None)[: len(returned)]

    def close(self) -> Count:
        """Have the gradients of the window be one on all processes; returns the factor that they still owe."""
        module = self._module
        assert module is not None
        self._silence(False)
        if self._in_use is None and not self.shards:
            buckets = self._buckets_of(module.trained)
            told = buckets.average(self._told)
            if self._wraps and (self._wrapped is None or buckets.unused):
                self._wrapped = Wrapped(module, self._settings, self._world, unused=buckets.unused)
            self._looks = False
            return self._read(told)
        if self._in_use is not None:
            self._in_use.check()
        if self._rides:
            assert module.told.grad is not None
            told = module.told.grad
        else:
            told = self._told / self._world.size
            self._world.sum(told)
        return self._read(told)

    def weigh_window(self, loss: StepLoss) -> Count:
        """Return the weight of a loss of this process's complete window; `average` takes the gradients afterwards."""
        window = self._window
        here = any(window.rows)
        self._begin()
        weight = loss.weight * window.weight_of(loss.count, is_sum=False, here=here)
        self._silence(not here)
        self._add_term(loss.loss, loss.count if here else 0, weight)
        return weight

    def average(self, parameters: Sequence[Tensor]) -> Count:
        """Average the gradients of a loss that was weighed; returns the factor that they still owe."""
        self._silence(False)
        if self.shards:
            told = self._told / self._world.size
            self._world.sum(told)
        else:
            told = self._buckets_of(parameters).average(self._told)
        self.note(parameters)
        return self._read(told)

    def settle(self, parameters: Sequence[Tensor]) -> bool:
        """Average gradients that nobody has averaged yet, by rows; whether there were any."""
        if self.is_default or all(self._seen.get(key) == now for key, now in fingerprint(parameters).items()):
            return False
        if self.shards:
            what = "a `backward` of your own under FSDP: its gradients are a mean over processes, not over rows"
            fix = "self.minimize(loss), or self.compute_gradients(window)"
            raise StepError(message(what, want="a loss that can be weighed before `backward`", fix=fix))
        share = self._shared(self._world.size)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and share:
            torch._foreach_mul_(gradients, share)
        elif gradients:
            torch._foreach_zero_(gradients)  # of rows that stand in, which may hold NaN: 0 times that is none
        self._buckets_of(parameters).average(torch.zeros(2))
        self.note(parameters)
        return True

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Have a step that somebody makes by hand move by gradients of all processes; StepError where it cannot."""
        if closure:
            what = f"{type(optimizer).__name__}.step(closure) by hand: each process would evaluate its own rows"
            raise StepError(message(what, fix="self.apply_gradients(closure=closure)"))
        parameters = parameters_in(optimizer)
        now = fingerprint(parameters)
        # Clipped in place since they were averaged, they are still those of all.
        if any(self._seen.get(key, (-1, 0))[0] != found or n < self._seen[key][1] for key, (found, n) in now.items()):
            self.settle(parameters)

    def note(self, parameters: Sequence[Tensor]) -> None:
        """Note that gradients are those of all processes, as they are now."""
        if not self.is_default:
            self._seen |= fingerprint(parameters)

    def check_trained(self) -> None:
        """Refuse gradients of layers that were set free inside an epoch: nobody has averaged them; StepError."""
        if not self._wraps or self._module is None:
            return
        known = {id(parameter) for parameter in self._module.trained}
        trained = parameters_in(*self._owner.optimizers.values())
        loose = [p for p in trained if id(p) not in known and p.requires_grad and p.grad is not None]
        if loose:
            what = "layers were set free inside an epoch: each process has moved them by gradients of its own"
            have = f"{len(loose)} parameters, such as one of shape {tuple(loose[0].shape)}"
            fix = "def begin_epoch(self, epoch): ...   # where all that is trained is taken over anew"
            raise StepError(message(what, have=have, want="such changes between two epochs", fix=fix, where=False))

    def mean(self, loss: Any) -> Any:
        """The mean over rows of a loss that each process has computed of its own rows."""
        value = torch.as_tensor(loss, dtype=torch.float64).detach() * self._shared(1)
        self._world.sum(value)
        return value.to(loss.dtype) if isinstance(loss, Tensor) else value

    @property
    def reported(self) -> Count:
        """The loss as it is told: a plain sum per row, which is NaN without one."""
        if self.counted is not None:
            return self.loss
        if self._window.whole:
            return self.loss / self._window.whole
        return torch.nan if self.is_default else self.loss

    @property
    def _in_use(self) -> Wrapped | None:
        """What averages the window in hand while it runs backward; None where that is done afterwards."""
        return None if self._looks else self._wrapped

    @property
    def _window(self) -> DealtWindow:
        window = self._owner.ledger.window
        assert isinstance(window, DealtWindow)
        return window

    def _shared(self, of: int) -> float:
        """This process's share of `of`, by rows; of a window without a row all run the same, and share alike."""
        window = self._window
        return of * sum(window.rows) / window.whole if window.whole else of / self._world.size

    def _begin(self) -> None:
        told = self._module.told if self._module is not None else None
        assert told is not None
        if self.carries_apart:
            self._told = torch.zeros_like(told.detach())
        told.grad = None

    def _silence(self, silent: bool) -> None:
        """Have the `backward` to come give gradients of 0, whatever it computes: 0 times NaN would be NaN."""
        if not silent and not self._silenced:
            return
        for handle in self._silenced:
            handle.remove()
        assert self._module is not None
        trained = self._module.trained if silent and not self.shards else []
        self._silenced = [parameter.register_hook(torch.zeros_like) for parameter in trained]

    def _forward(self, batch: Any, *, last: bool) -> tuple[Tensor, ...]:
        assert self._module is not None
        if self._in_use is not None:
            returned: tuple[Tensor, ...] = self._in_use(batch, last=last)
            return returned
        if self._set_sync is not None:
            self._set_sync(self._owner.model, last)
        return (self.recorded_step(batch),)

    def recorded_step(self, batch: Any) -> Tensor:
        """Run the user's step, record it, and return its loss."""
        owner, here = self._owner, not self._window.stands_in
        step_loss = owner.ledger.record(owner.training_step(batch))
        self._weight = step_loss.weight
        self._add_term(step_loss.loss, step_loss.count if here else 0, self._weight)
        return step_loss.loss

    def _add_term(self, loss: Tensor, count: Count | None, weight: Count) -> None:
        """Put the count of a micro-batch and its weighed loss where the gradients carry them to all processes."""
        assert self._module is not None
        told, value = self._module.told, weighed(loss, weight)
        kind, count = told.dtype, count or 0
        if value.is_cpu and not isinstance(count, Tensor):
            # torch.tensor would take ten times as long for two numbers.
            self.term = torch.from_numpy(np.array((count, host_reads.host_value(value)), _NUMPYS[kind]))
        else:
            counted = torch.as_tensor(count, dtype=kind, device=value.device)
            self.term = torch.stack([counted, value.to(kind)]).to(told.device)
        if self.carries_apart:
            self._told = self._told + self.term

    @property
    def carries_apart(self) -> bool:
        """Whether counts and losses are summed apart from the gradients: no DDP runs here, or it would round them."""
        return self._in_use is None or not self._rides

    def _read(self, told: Tensor) -> Count:
        window = self._window
        mean, weighed = told.tolist() if told.is_cpu else told.unbind()
        count = mean * window.processes
        self.loss = window.mean(count, weighed)
        self.counted = None if window.is_plain_sum else count
        return window.missing_factor_of(count)

    def _buckets_of(self, parameters: Sequence[Tensor]) -> Buckets:
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            size = getattr(self._settings, "bucket_mb", None)
            self._buckets[key] = Buckets(parameters, self._world, bucket_mb=size)
        return self._buckets[key]

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Run a batch that no row counts of: what it moves is put back, and its numbers are dropped."""
        ledger, statistics = self._owner.ledger, running_statistics(self._owner.model)
        kept = [statistic.clone() for statistic in statistics]
        noting, ledger.noting = ledger.noting, False
        try:
            with unmoved(), unnoticed(statistics):
                yield
                with torch.no_grad():
                    for statistic, before in zip(statistics, kept, strict=True):
                        statistic.copy_(before)
        finally:
            ledger.noting = noting


class _Step(nn.Module):
    """A module whose forward is the step, so that DDP can stand around whatever the step calls."""

    def __init__(self, spread: Spread, owner: Owner) -> None:
        super().__init__()
        self._spread = [spread]  # in a list: no part of the module
        self.model = owner.model
        self.loss = owner.loss if isinstance(owner.loss, nn.Module) else None
        inside = {id(parameter) for parameter in self.parameters()}
        beside = [parameter for parameter in parameters_in(*owner.optimizers.values()) if id(parameter) not in inside]
        self.beside = nn.ParameterList([one for one in beside if isinstance(one, nn.Parameter)])
        self.trained: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        self.layout = [(id(p), p.shape) for p in self.trained]
        wide = any(p.dtype == torch.float64 for p in self.trained)
        device = self.trained[0].device if self.trained else None
        self.told = nn.Parameter(torch.zeros(2, dtype=torch.float64 if wide else torch.float32, device=device))
        """Always 0; its gradient is what the window counts and its loss, which so travel with the others."""

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the loss of a micro-batch, and a 0 whose gradient is its count and its weighed loss."""
        spread = self._spread[0]
        loss = spread.recorded_step(batch)
        return (loss,) if spread.carries_apart else (loss, torch.dot(self.told, spread.term))
