"""Trains on the same few batches again and again: a model, loss and optimizer that can learn get their loss to zero."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from trainwright.core.checks import check_number, check_whole
from trainwright.core.durations import Updates
from trainwright.core.errors import NonFiniteError, listed
from trainwright.core.records import Update
from trainwright.core.suggestions import suggests
from trainwright.observers.probes import Probe
from trainwright.observers.table import number, rate
from trainwright.protocols import Observer
from trainwright.tools.trial import check_trainer, ready, traceless, variant
from trainwright.trainer import Trainer

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfit:
    """How the loss went on the same few batches; `print` shows it."""

    batches: int
    updates: int
    losses: tuple[float, ...]
    """The mean loss of each pass over the batches."""
    share: float
    """What the last loss was to be, as a share of the first, for `fell`."""
    untrained: tuple[str, ...]
    """Parameters that require a gradient and got none, or only zeros, each time that it was looked."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    error: str = ""
    """The error of a loss or gradient that was not finite, which ended it."""

    @property
    def fell(self) -> bool:
        """Whether the loss fell to at most `share` of what it was at first. A loss whose floor is not 0 never does."""
        return not self.error and len(self.losses) > 1 and self.losses[-1] <= self.share * self.losses[0]

    @property
    def _falls(self) -> bool:
        """Whether the loss was falling still when the updates were over."""
        return len(self.losses) > 2 and self.losses[-1] < 0.9 * self.losses[len(self.losses) // 2]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, `fell` among it."""
        return {**asdict(self), "fell": self.fell}

    def __str__(self) -> str:
        first, last = (self.losses[0], self.losses[-1]) if self.losses else (math.nan, math.nan)
        what = f"{self.batches} batch{'es' if self.batches > 1 else ''}, {self.updates} updates"
        verdict = "model, loss and optimizer can learn" if self.fell else "it does not learn them by heart"
        lines = [f"overfit {what}: loss {number(first)} to {number(last)}: {verdict}"]
        lines += [f"  {self.error}"] if self.error else []
        if self.untrained:
            lines.append(f"  no gradient reaches {listed(self.untrained, 6)}")
        if not self.fell and self._falls:
            lines.append(f"  the loss was falling still: overfit_batches(..., updates={4 * self.updates})")
        elif not self.fell:
            rates = ", ".join(dict.fromkeys(map(rate, self.rates)))
            lines.append(f"  learning rate {rates}: try others by find_lr(trainer, train)")
            lines.append(
                "  do targets belong to their inputs? does the loss read what the model gives, is its least 0?"
            )
        return "\n".join(lines)


@suggests
def overfit_batches(
    trainer: Trainer[Any],
    train: Any,
    batches: int = 1,
    *,
    updates: int = 300,
    share: float = 0.05,
    batch_size: int | None = None,
) -> Overfit:
    """Train on the same first `batches` batches for at most `updates` updates, and say whether the loss fell to zero.

    It ends early where the loss has come down to `share` of what it was, twice in a row. Dropout modules are off and
    each batch is one update; rates stay as the optimizer has them, without a schedule. Afterwards everything is as it
    was, as after `smoke_run`. SettingError in a group of several processes; DataError for a stream.
    """
    check_trainer(trainer, "overfit_batches")
    for name, value in (("batches", batches), ("updates", updates)):
        check_whole(value, f"overfit_batches({name}={value!r})")
    check_number(share, f"overfit_batches(share={share!r})", above=0, below=1, what="a share")
    with traceless(trainer):
        found = ready(variant(trainer, accumulate=1), train, updates=batches, batch_size=batch_size)
        for module in trainer.model.modules():
            if isinstance(module, _DROPOUT):
                module.eval()
        watch = _LossRecorder(len(found), share)
        twin = variant(trainer, accumulate=1, observers=[watch, Probe(watch.look, every=Updates(len(found)))])
        error = ""
        try:
            twin.fit(found, max_updates=updates)
        except NonFiniteError as raised:
            error = str(raised).splitlines()[0]
        return Overfit(
            batches=len(found),
            updates=twin.progress.updates,
            losses=tuple(watch.passes),
            share=share,
            untrained=tuple(watch.untrained or ()),
            rates=tuple(float(group["lr"]) for one in trainer.optimizers.values() for group in one.param_groups),
            error=error,
        )


class _LossRecorder(Observer):
    """Keeps the mean loss of each pass, and ends the run where it is near zero."""

    def __init__(self, batches: int, share: float) -> None:
        self.passes: list[float] = []
        self._batches, self._share = batches, share
        self._running: list[float] = []
        self.untrained: list[str] | None = None
        """Parameters that no gradient has reached so far; None before it was looked."""

    def on_update(self, update: Update) -> None:
        self._running.append(update.loss)
        if len(self._running) == self._batches:
            self.passes.append(math.fsum(self._running) / self._batches)
            self._running = []

    def look(self, trainer: Trainer[Any]) -> None:
        """Note what gradients reach; stop where the last two passes were near zero."""
        if self.untrained != []:
            names = _untrained(trainer)
            self.untrained = [name for name in names if self.untrained is None or name in self.untrained]
        low = [loss <= self._share * self.passes[0] for loss in self.passes[-2:]]
        if len(self.passes) > 2 and all(low):
            trainer.stop("near zero")


def _untrained(trainer: Trainer[Any]) -> tuple[str, ...]:
    named = [(name, one) for name, one in trainer.model.named_parameters() if one.requires_grad]
    return tuple(name for name, one in named if one.grad is None or not one.grad.any())
