"""Updates of several ranks: each rank runs its rows of a window; gradients, counts and losses are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, StepError
from trainwright.core.records import Count
from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import versions_preserved
from trainwright.core.trees import parameters_in
from trainwright.distributed.ddp import DDP, GradientBuckets, Wrapped, fingerprint
from trainwright.distributed.mesh import Slice
from trainwright.distributed.world import ProcessGroupWorld, World
from trainwright.modules.modes import running_statistics
from trainwright.update.loss_tracker import BackwardArgs
from trainwright.update.losses import StepLoss
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Move, Window, weighted_value

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients
    from trainwright.update.optimizer_steps import SelectedOptimizers
    from trainwright.update.trainer_like import TrainerLike


class ShardedWindow(Window):
    """The micro-batches of a window that this rank runs.

    Gradients are averaged over the ranks, so a mean loss over `count` out of the `all_count` of the window has the
    weight

        ranks * count / all_count

    Since `all_count` is known only after all steps, losses are weighted with the rows of the window instead. The
    gradients are then multiplied by `missing_factor = all_rows / all_count`; `all_count` is reduced together with the
    gradients. A dummy, which is a micro-batch without rows of this rank, has the weight 0.
    """

    def __init__(
        self,
        batches: list[Any],
        rows: list[int],
        counts: list[Count] | None = None,
        *,
        all_rows: int,
        all_batches: int,
        ranks: int,
        move: Move | None = None,
    ) -> None:
        super().__init__(batches, rows, counts, move=move)
        self.is_single = False  # also a single mean is weighted, and `finish_backward` always runs
        self.all_rows, self.all_batches, self.ranks = all_rows, all_batches, ranks
        self.all_count: Count | None = None
        """The count of the window, once it is reduced after the last `backward`; None for a plain sum."""
        self.is_plain_sum = False
        """Whether the losses are sums without a count."""

    @property
    def is_dummy(self) -> bool:
        """Whether the next micro-batch has no rows of this rank."""
        index = self.position + 1
        return index < len(self.rows) and not self.rows[index]

    def weight(self, count: Count | None, *, is_sum: bool) -> Count:
        """Return the weight with which the mean of the gradients over all ranks is the gradient of the window."""
        return self.weight_of(count, is_sum=is_sum, has_rows=self.rows[self.position] > 0)

    def weight_of(self, count: Count | None, *, is_sum: bool, has_rows: bool) -> Count:
        """Return the weight of a loss; 0 for a micro-batch without rows of this rank."""
        self.is_plain_sum = count is None
        if not has_rows:
            return 0.0
        if count is None:
            return float(self.ranks)
        divisor = self.all_rows / self.ranks
        return (1.0 if is_sum else count) / divisor

    @property
    def missing_factor(self) -> Count:
        """The remaining factor of the gradients: all_rows / all_count; 1.0 for a plain sum and for a count of 0."""
        count = self.all_count
        if count is None:
            return 1.0
        if isinstance(count, Tensor):
            return torch.where(count == 0, torch.ones_like(count), self.all_rows / count)
        return self.all_rows / count if count else 1.0

    def mean(self, count: Count, weighted_loss: Count) -> Count:
        """Return the unscaled loss of the window over all ranks; NaN for a count of 0."""
        if self.is_plain_sum:
            return weighted_loss
        if isinstance(count, Tensor):
            return weighted_loss * self.all_rows / count  # 0 / 0 is NaN
        return weighted_loss * self.all_rows / count if count else torch.nan


def sharded_windows(
    slices: Iterable[Slice],
    accumulate: int,
    *,
    world: World,
    same_number: bool,
    dummies_beside_rows: bool,
    rows: Callable[[Any], int],
    count: Callable[[Any], Count] | None = None,
    move: Move | None = None,
) -> Iterator[ShardedWindow]:
    """Group slices into windows of `accumulate`; `rows`: returns the rows of a batch of a stream.

    If all ranks share the batches, each rank computes the rows of all ranks. If each rank reads a separate stream, the
    rows of each window are summed over the ranks when it is fetched, until no rank has a batch.

    A rank without rows in a window runs a dummy, since all ranks must take part in the collectives of the window.
    `same_number`: whether all ranks must run the same number of micro-batches. `dummies_beside_rows`: whether a rank
    with rows may run dummies; False for custom code that may join the micro-batches of a window, where the rows of a
    dummy would count.
    """
    slices, ranks = iter(slices), world.mesh.data
    last: Slice | None = None
    while True:
        group = list(islice(slices, accumulate))
        nearest = group[0] if group else last
        if nearest is not None and nearest.all_rows is not None:  # all ranks share the batches
            if not group:
                return
            own = [rows(one.batch) if one.rows is None else one.rows for one in group]
            all_rows, most = sum(one.all_rows or 0 for one in group), len(group)
        else:
            own = [rows(one.batch) for one in group]
            all_rows, lengths = _sum_over_ranks(own, world)
            most = max(lengths)
            if not most:
                return
            needed = most if same_number else 1
            if min(lengths) < needed:
                dummy = _dummy(group, last if all_rows else None, world=world, some_have_none=not min(lengths))
                missing = needed - len(group)
                group, own = group + missing * [dummy], own + missing * [0]
        last = group[-1]
        if not dummies_beside_rows and any(own):
            group, own = [one for one, n in zip(group, own, strict=True) if n], [n for n in own if n]
        batches = [one.batch for one in group]
        counts: list[Count] | None = None
        if count is not None and len(group) > 1:  # the count of a dummy is 0, also for `shares` in a custom loop
            counts = [count(batch) if n else 0 for batch, n in zip(batches, own, strict=True)]
        yield ShardedWindow(batches, own, counts, all_rows=all_rows, all_batches=most, ranks=ranks, move=move)


def _sum_over_ranks(own: list[int], world: World) -> tuple[int, list[int]]:
    """Return the rows of a window over all ranks and the micro-batches of each rank, by one collective on the host."""
    mesh = world.mesh
    lengths = [float(len(own)) if rank == mesh.rank else 0.0 for rank in range(mesh.data)]
    rows, *each = world.sum_numbers(sum(own), *lengths)
    return int(rows), [int(length) for length in each]


def _dummy(group: list[Slice], last: Slice | None, *, world: World, some_have_none: bool) -> Slice:
    """Return a dummy for a rank with too few micro-batches: its last micro-batch, or the first of another rank."""
    own = group[-1] if group else last
    if some_have_none and any(world.all_gather(own is None)):
        offered = world.all_gather(group[0].batch if group else None)
        first = next(batch for batch in offered if batch is not None)  # at least one rank has a batch
        own = Slice(first, 0, None) if own is None else own
    assert own is not None
    return Slice(own.batch, 0, None)


_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}


class DistributedCheck(UpdateStrategy):
    """Makes the updates of a run of several ranks.

    The default update runs the step under torch's DDP, which averages gradients during `backward`. A custom `update`
    may read gradients in any order, so there the step is not wrapped, and gradients are averaged after `backward`.

    The policy and the weights need two numbers of all ranks for each window: its count and its weighted loss. DDP
    averages them in the all-reduce of the gradients at no cost: they are the gradient of a parameter of two zeros,
    `_StepModule.stats_param`; each forward also returns its dot product with the numbers of the micro-batch.
    """

    _window: ShardedWindow
    """The window of the current update."""
    _in_use: Wrapped | None = None
    """DDP, if it averages during `backward`; None if gradients are averaged afterwards."""
    reduces_stats_separately = True
    """Whether counts and losses are averaged after the window: without DDP, or if DDP would round them."""
    _stats_param: Tensor
    """The parameter with these numbers as gradient; stored here, since an attribute of a module is slower to read."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        trainer = run.trainer
        assert isinstance(trainer.world, ProcessGroupWorld)
        self._trainer, self._world = trainer, trainer.world
        self._settings = trainer.parallel if isinstance(trainer.parallel, DDP) else DDP()
        self._is_sharded = trainer.parallel.shards
        """Whether each rank holds a shard of the weights, so that every forward is a collective."""
        hooks = trainer._hooks
        self._is_default = not (hooks.has_custom_update or hooks.overrides_compute_gradients)
        """Whether no user code reads or computes gradients."""
        self._wraps = self._is_default and not self._is_sharded
        if not self._wraps and self._settings.compress is not None:
            what = f"DDP(compress={self._settings.compress!r}) beside an `update` of your own, which reads gradients"
            raise SettingError(what, want="gradients as they are", fix="DDP() without compress")
        self._ddp_averages_stats = self._wraps and self._settings.compress is None
        """Whether DDP averages counts and losses with the gradients; with `compress` it would round them."""
        self._set_sync: Any = None
        if self._is_sharded:
            from trainwright.distributed.fsdp import set_sync

            self._set_sync = set_sync
        self._module: _StepModule | None = None
        self._wrapped: Wrapped | None = None
        self._finds_unused = False
        """Whether the current window, the first one of an epoch, determines the unused parameters."""
        self._buckets: dict[tuple[int, ...], GradientBuckets] = {}
        self._zero_hooks: list[Any] = []
        """Hooks that set gradients to 0 during the backward of a dummy."""
        self._reduced: dict[int, tuple[int, int]] = {}
        """By parameter: the fingerprint of its gradient directly after it was averaged over the ranks."""
        self.loss: Count = 0.0
        """The loss of the current window over all ranks."""
        self._checked_loss = 0.0
        """The loss over all ranks at the last read."""
        self.step, self.backward_args = self._run_step, self._backward_args

    def windows(self, batches: Iterable[Any], accumulate: int, *, move: Move | None) -> Iterator[Window]:
        """Group this rank's slices of batches into windows."""
        hooks = self._trainer._hooks
        return sharded_windows(
            batches,
            accumulate,
            world=self._world,
            same_number=self._is_sharded or (self._wraps and self._settings.static_graph),
            dummies_beside_rows=self._is_sharded or self._is_default,
            rows=hooks.rows,
            count=hooks.count,
            move=move,
        )

    def regroup(self) -> None:
        """Update the trained parameters, after layers were added, frozen or unfrozen, or became unused."""
        module, unused = _StepModule(self, self._trainer), self._settings.find_unused_parameters
        if self._module is not None and self._module.layout == module.layout:
            all_used = self._wrapped is not None and not self._wrapped.unused
            self._finds_unused = all_used and unused == "auto" and not self._settings.static_graph
            return
        self._module, self._wrapped, self._buckets, self._finds_unused = module, None, {}, False
        self._stats_param = module.stats_param
        if self._wraps and (unused != "auto" or self._settings.static_graph):
            self._wrapped = Wrapped(module, self._settings, self._world, unused=unused is True)

    def begin(self, window: Window) -> None:
        """Begin the update of a window: none of its gradients are averaged yet."""
        super().begin(window)
        assert isinstance(window, ShardedWindow)
        self._window, self.loss = window, 0.0
        self._in_use = None if self._finds_unused else self._wrapped
        self.reduces_stats_separately = self._in_use is None or not self._ddp_averages_stats
        self._reduced.clear()
        if self._zero_hooks:
            self._zero_gradients(False)
        if self._settings.sync_buffers:  # before any forward, which may save buffers for its backward
            self._world.broadcast_tensors(self._trainer.model.buffers())

    def _run_step(self, batch: Any) -> tuple[Tensor, ...]:
        """Run the step of the next micro-batch; return its loss, and under DDP the term for count and loss."""
        window = self._window
        if window.position < 0:
            self._reset_stats()
        last = window.position + 2 == len(window.batches)
        is_dummy = window.is_dummy
        if is_dummy or self._zero_hooks:
            self._zero_gradients(is_dummy)
        if is_dummy:
            with self._no_side_effects():
                return self._forward(batch, last=last)
        return self._forward(batch, last=last)

    def _backward_args(self, returned: tuple[Tensor, ...]) -> BackwardArgs:
        """Return the arguments of `backward`: the loss with its weight, and the term for count and loss without."""
        grad_tensor = self._trainer._tracker.grad_tensor(returned[0], self._weight)
        return returned, (grad_tensor, None)[: len(returned)]

    def finish_backward(self, window: Window) -> Any:
        """Average the gradients of the window over the ranks, unless DDP has done so; read the count of the window."""
        module = self._module
        assert module is not None
        if self._zero_hooks:
            self._zero_gradients(False)
        if self._in_use is None and not self._is_sharded:
            buckets = self._buckets_of(module.trained)
            stats = buckets.average(self._window_stats)
            if self._wraps and (self._wrapped is None or buckets.unused):
                self._wrapped = Wrapped(module, self._settings, self._world, unused=buckets.unused)
            self._finds_unused = False
        elif self._ddp_averages_stats:
            assert self._in_use is not None
            self._in_use.check()
            assert self._stats_param.grad is not None
            stats = self._stats_param.grad
        else:
            if self._in_use is not None:
                self._in_use.check()
            stats = self._window_stats / self._world.size
            self._world.all_reduce(stats)
        if not self._is_default:
            self._mark(self._run.gradients.parameters)
        self._read_stats(stats)
        return super().finish_backward(window)

    def weight_of_minimized(self, loss: StepLoss) -> Count:
        """Return the weight of a loss over all rows of this rank in the window."""
        window = self._window
        has_rows = any(window.rows)
        self._reset_stats()
        weight = loss.weight * window.weight_of(loss.count, is_sum=False, has_rows=has_rows)
        self._zero_gradients(not has_rows)
        self._record_stats(loss.loss, loss.count if has_rows else 0, weight)
        return weight

    def all_reduce_minimized(self, parameters: Sequence[Tensor]) -> Count:
        """Average the gradients of a loss given to `minimize`; return their missing factor."""
        self._zero_gradients(False)
        if self._is_sharded:
            stats = self._window_stats / self._world.size
            self._world.all_reduce(stats)
        else:
            stats = self._buckets_of(parameters).average(self._window_stats)
        self._mark(parameters)
        self._read_stats(stats)
        return self._window.missing_factor

    def unscale_and_check(self, gradients: Gradients) -> Tensor | None:
        """Average gradients of a custom `backward`, then unscale and check them."""
        if self._is_default:
            return super().unscale_and_check(gradients)
        self._reduce_manual(gradients.parameters)
        found_inf = super().unscale_and_check(gradients)
        self._mark(gradients.parameters)
        return found_inf

    def _reduce_manual(self, parameters: Sequence[Tensor]) -> bool:
        """Average gradients that are not averaged yet, weighted by rows; return whether there were any."""
        if self._is_default or all(self._reduced.get(key) == now for key, now in fingerprint(parameters).items()):
            return False
        if self._is_sharded:
            what = "a `backward` of your own under FSDP: its gradients are a mean over processes, not over rows"
            fix = "self.minimize(loss), or self.compute_gradients(window)"
            raise StepError(what, want="a loss that can be weighted before `backward`", fix=fix)
        share = self._share_of(self._world.size)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and share:
            torch._foreach_mul_(gradients, share)
        elif gradients:
            torch._foreach_zero_(gradients)  # not multiplied: gradients of a dummy may be NaN, and 0 * NaN is NaN
        self._buckets_of(parameters).average(torch.zeros(2))
        self._mark(parameters)
        return True

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Average the gradients of a manual step of the user; StepError if that is impossible."""
        if self.in_closure:
            return
        if closure:
            what = f"{type(optimizer).__name__}.step(closure) by hand: each process would evaluate its own rows"
            raise StepError(what, fix="self.apply_gradients(closure=closure)")
        parameters = parameters_in(optimizer)
        now = fingerprint(parameters)
        # Gradients that were clipped in place after the averaging are still averages.
        if any(
            self._reduced.get(key, (-1, 0))[0] != found or n < self._reduced[key][1] for key, (found, n) in now.items()
        ):
            self._reduce_manual(parameters)

    def _mark(self, parameters: Sequence[Tensor]) -> None:
        """Record that the current gradients are averages over the ranks."""
        self._reduced |= fingerprint(parameters)

    def synchronize(self) -> None:
        """Check that all gradients were averaged, and report the held updates. Called by all ranks."""
        self._check_trained()
        self.reporter.report_held()

    def _check_trained(self) -> None:
        """Raise StepError for layers that were unfrozen inside an epoch, whose gradients were not averaged."""
        if not self._wraps or self._module is None:
            return
        known = {id(parameter) for parameter in self._module.trained}
        trained = parameters_in(*self._trainer.optimizers.values())
        loose = [p for p in trained if id(p) not in known and p.requires_grad and p.grad is not None]
        if loose:
            what = "layers were unfrozen inside an epoch: each rank has updated them by gradients of its own"
            have = f"{len(loose)} parameters, such as one of shape {tuple(loose[0].shape)}"
            fix = "def begin_epoch(self, epoch): ...   # where the trained parameters are found again"
            raise StepError(what, have=have, want="such changes between two epochs", fix=fix, where=False)

    def all_reduce_closure_loss(self, loss: Any, gradients: Gradients) -> Any:
        """Return the mean over the rows of all ranks of a closure's loss, unless `backward` already averaged it."""
        if not self._reduce_manual(gradients.parameters):
            return loss
        value = torch.as_tensor(loss, dtype=torch.float64).detach() * self._share_of(1)
        self._world.all_reduce(value)
        return value.to(loss.dtype) if isinstance(loss, Tensor) else value

    def complete_loss(self, loss: Tensor, factor: Count) -> Tensor:
        """Return the loss of the window over all ranks, with dtype and device of `loss`."""
        return torch.as_tensor(self.loss, dtype=loss.dtype, device=loss.device)

    def read(
        self, found_inf: Tensor | None, chosen: SelectedOptimizers, *more: float | Tensor
    ) -> tuple[bool, list[float]]:
        """Read the recorded numbers, norms, `more` and the loss of all ranks, in one read."""
        overflowed, (*rest, self._checked_loss) = super().read(found_inf, chosen, *more, self._loss_of_ranks())
        if self._is_default:
            self._trainer._tracker.loss = self._checked_loss
        return overflowed, rest

    def may_step(self, chosen: SelectedOptimizers, loss: float, *, overflowed: bool) -> bool:
        """Decide by the loss over all ranks, so that all ranks decide the same; gradients are averaged already."""
        return super().may_step(chosen, self._checked_loss, overflowed=overflowed)

    def _loss_of_ranks(self) -> Count:
        """Return the loss over all ranks; a plain sum is divided by the rows, and is NaN without rows."""
        if self.counted is not None:
            return self.loss
        if self._window.all_rows:
            return self.loss / self._window.all_rows
        return torch.nan if self._is_default else self.loss

    def _share_of(self, of: int) -> float:
        """Return `of` times this rank's fraction of the rows of the window; equal fractions if it has no rows."""
        window = self._window
        return of * sum(window.rows) / window.all_rows if window.all_rows else of / self._world.size

    def _reset_stats(self) -> None:
        if self.reduces_stats_separately:
            self._window_stats = torch.zeros_like(self._stats_param.detach())
        self._stats_param.grad = None

    def _zero_gradients(self, zero: bool) -> None:
        """Set the gradients of the next `backward` to 0, or stop that. A weight of 0 is not enough: 0 * NaN is NaN."""
        if not zero and not self._zero_hooks:
            return
        for handle in self._zero_hooks:
            handle.remove()
        assert self._module is not None
        trained = self._module.trained if zero and not self._is_sharded else []
        self._zero_hooks = [parameter.register_hook(torch.zeros_like) for parameter in trained]

    def _forward(self, batch: Any, *, last: bool) -> tuple[Tensor, ...]:
        assert self._module is not None
        if self._in_use is not None:
            returned: tuple[Tensor, ...] = self._in_use(batch, last=last)
            return returned
        if self._set_sync is not None:
            self._set_sync(self._trainer.model, last)
        return (self.recorded_step(batch),)

    def recorded_step(self, batch: Any) -> Tensor:
        """Run and record the step of a micro-batch; return its loss."""
        trainer, has_rows = self._trainer, not self._window.is_dummy
        step_loss = trainer._tracker.record(trainer.training_step(batch))
        assert step_loss is not None
        self._weight = step_loss.weight
        self._record_stats(step_loss.loss, step_loss.count if has_rows else 0, self._weight)
        return step_loss.loss

    def _record_stats(self, loss: Tensor, count: Count | None, weight: Count) -> None:
        """Record count and weighted loss of a micro-batch, for the average over the ranks."""
        stats, value = self._stats_param, weighted_value(loss, weight)
        kind, count = stats.dtype, count or 0
        if value.is_cpu and not isinstance(count, Tensor):
            # `torch.tensor` takes ten times as long for two numbers.
            self.batch_stats = torch.from_numpy(np.array((count, host_reads.host_value(value)), _NUMPYS[kind]))
        else:
            counted = torch.as_tensor(count, dtype=kind, device=value.device)
            self.batch_stats = torch.stack([counted, value.to(kind)]).to(stats.device)
        if self.reduces_stats_separately:
            self._window_stats = self._window_stats + self.batch_stats

    def _read_stats(self, stats: Tensor) -> None:
        """Set count and loss of the window, from their means over the ranks."""
        window = self._window
        mean_count, weighted_loss = stats.tolist() if stats.is_cpu else stats.unbind()
        count = mean_count * window.ranks
        self.loss = window.mean(count, weighted_loss)
        self.counted = window.all_count = None if window.is_plain_sum else count

    def _buckets_of(self, parameters: Sequence[Tensor]) -> GradientBuckets:
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = GradientBuckets(parameters, self._world, bucket_mb=self._settings.bucket_mb)
        return self._buckets[key]

    @contextmanager
    def _no_side_effects(self) -> Iterator[None]:
        """Run a dummy inside the block: statistics and random states are restored, and its numbers are dropped."""
        tracker, statistics = self._trainer._tracker, running_statistics(self._trainer.model)
        copies = [statistic.clone() for statistic in statistics]
        recording, tracker.recording = tracker.recording, False
        try:
            with rng_preserved(), versions_preserved(statistics):
                yield
                with torch.no_grad():
                    for statistic, before in zip(statistics, copies, strict=True):
                        statistic.copy_(before)
        finally:
            tracker.recording = recording


class _StepModule(nn.Module):
    """A module whose forward is the step, so that DDP wraps everything that the step calls."""

    def __init__(self, strategy: DistributedCheck, trainer: TrainerLike) -> None:
        super().__init__()
        self._strategy = [strategy]  # in a list: not a submodule
        self.model = trainer.model
        self.loss = trainer.loss if isinstance(trainer.loss, nn.Module) else None
        inside = {id(parameter) for parameter in self.parameters()}
        others = [parameter for parameter in parameters_in(*trainer.optimizers.values()) if id(parameter) not in inside]
        self.others = nn.ParameterList([parameter for parameter in others if isinstance(parameter, nn.Parameter)])
        self.trained: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        self.layout = [(id(p), p.shape) for p in self.trained]
        wide = any(p.dtype == torch.float64 for p in self.trained)
        device = self.trained[0].device if self.trained else None
        self.stats_param = nn.Parameter(torch.zeros(2, dtype=torch.float64 if wide else torch.float32, device=device))
        """Two zeros; the gradient is the count of the window and its weighted loss."""

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the loss of a micro-batch, and a zero whose gradient is its count and its weighted loss."""
        strategy = self._strategy[0]
        loss = strategy.recorded_step(batch)
        if strategy.reduces_stats_separately:
            return (loss,)
        return loss, torch.dot(strategy._stats_param, strategy.batch_stats)
