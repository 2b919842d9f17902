"""Debugging tools: anomaly mode, deterministic kernels, a smoke run, and overfitting on a few batches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainwright.checkpointing.parts import check_savable, gather
from trainwright.core.checks import check_number, check_whole
from trainwright.core.durations import Updates
from trainwright.core.errors import NonFiniteError, SettingError, listed
from trainwright.core.records import Update
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.data.opening import takes_batch_size
from trainwright.observers.probes import Probe
from trainwright.observers.table import duration, number, rate
from trainwright.protocols import Observer
from trainwright.tools.trial import check_trainer, is_several, open_afresh, ready, traceless, variant
from trainwright.trainer import Trainer

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""Workspace settings for which cuBLAS is deterministic."""


@contextmanager
@suggests
def anomaly(*, check_nan: bool = True) -> Iterator[None]:
    """Enable torch's anomaly mode: an error or NaN in backward names the line of its forward.

    `with anomaly(): trainer.fit(...)`. The mode stores a traceback of every operation, and is restored at the end. A
    NaN raises at once, also if `on_nonfinite="skip"` or an fp16 loss scale would skip the update. In compiled code only
    the call is named: `Fast(compile=None)` shows the line.

    Args:
        check_nan: Read each gradient. On CUDA this synchronizes for each one.
    """
    with torch.autograd.set_detect_anomaly(True, check_nan):
        yield


@contextmanager
@suggests
def deterministic(*, warn_only: bool = False, fill: bool = True) -> Iterator[None]:
    """Use deterministic kernels: each run on the same machine with the same versions gives the same bits.

    `with deterministic(): trainer.fit(...)`. Sets, and restores at the end: deterministic algorithms of torch and
    cuDNN, `cudnn.benchmark=False`, and `CUBLAS_WORKSPACE_CONFIG`, which torch reads once, at the first matrix product
    on CUDA. It sets no seeds.

    Args:
        warn_only: Warn of operations without a deterministic kernel. False: they raise.
        fill: Fill new memory with NaN, which reveals reads of uninitialized memory.

    Raises:
        SettingError: If a matrix product on CUDA has already used another workspace.
    """
    with ExitStack() as undo:
        undo.enter_context(_workspace())
        undo.enter_context(_repeating(warn_only=warn_only, fill=fill))
        if torch.cuda.is_initialized() and not warn_only:
            _check_products()
        yield


@contextmanager
def _workspace() -> Iterator[None]:
    """Set a fixed workspace for cuBLAS, unless the environment has one. It is read at the first product."""
    before = os.environ.get(WORKSPACE)
    if before not in _FIXED:
        os.environ[WORKSPACE] = _FIXED[0]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = before


@contextmanager
def _repeating(*, warn_only: bool, fill: bool) -> Iterator[None]:
    """Enable the deterministic algorithms of torch and cuDNN."""
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    exact, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, fill
        yield
    finally:
        torch.use_deterministic_algorithms(exact, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before


def _check_products() -> None:
    """Raise SettingError if cuBLAS uses another workspace already: torch has read the environment."""
    one = torch.ones(1, 1, device="cuda")
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        if WORKSPACE not in str(error):
            raise
        what = f"deterministic(), and CUDA has multiplied matrices without {WORKSPACE}"
        fix = f'os.environ["{WORKSPACE}"] = "{_FIXED[0]}" at the top of the script'
        raise SettingError(what, want="a workspace that is set before the first product", fix=fix) from None


# Sanity checks before a long run.

_BY_LENGTH = ("schedule", "average")
"""Slots that may refuse a run as short as a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRun:
    """The result of `smoke_run`. `print` shows it."""

    updates: int
    """Number of applied updates."""
    skipped: int
    """Number of skipped updates."""
    losses: tuple[float, ...]
    """The loss of each update."""
    numbers: Mapping[str, float]
    """The last row: means over the updates and over the validation batches."""
    ran: tuple[str, ...]
    """The parts that ran, one line each."""
    left_out: tuple[str, ...]
    """The parts that did not run, with the reason."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        numbers = " · ".join(f"{name} {number(value)}" for name, value in self.numbers.items())
        lines = [f"smoke run: {self.updates} updates in {duration(self.seconds)}, nothing was changed", f"  {numbers}"]
        lines += [f"  ran       {line}" for line in self.ran] + [f"  not run   {line}" for line in self.left_out]
        return "\n".join(lines)


@suggests
def smoke_run(
    trainer: Trainer[Any], train: Any, val: Any = None, *, updates: int = 3, batch_size: int | None = None
) -> SmokeRun:
    """Run `updates` updates, all hooks, two batches of each validation set, and a checkpoint; restore everything.

    Raises the errors of `fit`. Restores weights, optimizers, counters and random states afterwards; files written by
    your hooks remain. Observers are not called.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        val: Validation data, as for `fit`.
        updates: The number of updates.
        batch_size: As for `fit`.

    Raises:
        SettingError: With several ranks.
        DataError: For a stream that cannot be read again.
    """
    check_trainer(trainer, "smoke_run")
    check_whole(updates, f"smoke_run(updates={updates!r})")
    with traceless(trainer) as before:
        found = ready(trainer, train, updates=updates, batch_size=batch_size)
        held_out = None if val is None else _held_out(val, batch_size)
        parts = {name: getattr(trainer, name) for name in _BY_LENGTH if getattr(trainer, name) is not None}
        try:
            return _run_once(trainer, found, held_out, updates=updates, parts=parts)
        except SettingError as error:
            before.restore()
            if not parts:
                raise
            run = _run_once(trainer, found, held_out, updates=updates, parts={})  # any other error is raised again
            why = f"{', '.join(parts)}, in so short a run: {str(error).splitlines()[0]}"
            return replace(run, left_out=(why, *run.left_out))


class _Losses(Observer):
    """Records the loss of each update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_update(self, update: Update) -> None:
        self.seen.append(update.loss)


def _run_once(
    trainer: Trainer[Any], found: list[Any], held_out: Any, *, updates: int, parts: Mapping[str, Any]
) -> SmokeRun:
    losses, saved = _Losses(), list[str]()

    def save(twin: Trainer[Any]) -> None:
        parts = twin.parts()
        check_savable(gather(parts), twin.metrics)
        saved.extend(parts)

    observers = [losses, *([] if trainer.checkpoint is None else [Probe(save, every=Updates(updates))])]
    early = trainer.early_stopping
    if early is not None and (held_out is not None or not early.monitor.startswith("val_")):
        parts = {**parts, "early_stopping": early}
    twin = variant(trainer, metrics=trainer.metrics, observers=observers, **parts)
    begun = time.perf_counter()
    result = twin.fit(found, held_out, max_updates=updates)
    seconds = time.perf_counter() - begun
    return SmokeRun(
        updates=result.updates,
        skipped=result.skipped,
        losses=tuple(losses.seen),
        numbers={name: value for name, value in result.history[-1].items() if name not in ("epoch", "update")},
        ran=_ran(trainer, twin, held_out, parts=parts, saved=saved),
        left_out=_left_out(trainer, held_out),
        seconds=seconds,
    )


def _held_out(val: Any, batch_size: int | None) -> Any:
    """Return two batches of each validation set."""
    if is_several(val):
        return {name: _held_out(one, batch_size) for name, one in val.items()}
    with rng_preserved():
        source = open_afresh(val, batch_size=batch_size if takes_batch_size(val) else None, role="val")
        with rng_preserved(source.generators):
            return list(islice(source.epoch(0), 2))


def _ran(
    trainer: Trainer[Any], twin: Trainer[Any], held_out: Any, *, parts: Mapping[str, Any], saved: list[str]
) -> tuple[str, ...]:
    k = trainer.accumulate[0][1]
    lines = [f"training, {k} micro-batch{'es' if k > 1 else ''} per update, on {trainer.device}"]
    lines += [f"precision {trainer.precision}"] if trainer.precision is not None else []
    lines += [name.replace("_", " ") for name in parts]
    lines += [f"metrics {', '.join(trainer.metrics)}"] if trainer.metrics else []
    if held_out is not None:
        lines.append(f"validation of {len(held_out)} {'sets' if isinstance(held_out, dict) else 'batches'}")
    lines += [f"the checkpoint up to its file: {', '.join(saved)}"] if saved else []
    hooks = [name for name in ("begin_epoch", "end_epoch", "after_update") if getattr(twin._hooks, name) is not None]
    return (*lines, *([f"hooks {', '.join(hooks)}"] if hooks else []))


def _left_out(trainer: Trainer[Any], held_out: Any) -> tuple[str, ...]:
    lines = ["validation: smoke_run(trainer, train, val) runs it"] if held_out is None else []
    lines += ["saving: there is no checkpoint slot"] if trainer.checkpoint is None else []
    early = trainer.early_stopping
    if early is not None and held_out is None and early.monitor.startswith("val_"):
        lines.append(f"early stopping: it watches {early.monitor}")
    watching = [type(one).__name__ for one in trainer.observers if type(one).__module__.split(".")[0] != "trainwright"]
    return (*lines, *([f"observers {', '.join(watching)}"] if watching else []))


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfit:
    """The result of `overfit_batches`: the losses on the same few batches. `print` shows them."""

    batches: int
    updates: int
    losses: tuple[float, ...]
    """The mean loss of each pass over the batches."""
    share: float
    """The share of the first loss that the last loss must not exceed for `fell`."""
    untrained: tuple[str, ...]
    """Parameters that require a gradient, and had none or only zeros at each check."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    error: str = ""
    """The error of a non-finite loss or gradient that ended the run; empty if none did."""

    @property
    def fell(self) -> bool:
        """Whether the loss fell to at most `share` of its first value. A loss with a minimum above 0 may never."""
        return not self.error and len(self.losses) > 1 and self.losses[-1] <= self.share * self.losses[0]

    @property
    def _falls(self) -> bool:
        """Whether the loss was still falling at the last update."""
        return len(self.losses) > 2 and self.losses[-1] < 0.9 * self.losses[len(self.losses) // 2]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with `fell`."""
        return {**asdict(self), "fell": self.fell}

    def __str__(self) -> str:
        first, last = (self.losses[0], self.losses[-1]) if self.losses else (math.nan, math.nan)
        what = f"{self.batches} batch{'es' if self.batches > 1 else ''}, {self.updates} updates"
        verdict = "model, loss and optimizer can learn" if self.fell else "it does not memorize them"
        lines = [f"overfit {what}: loss {number(first)} to {number(last)}: {verdict}"]
        lines += [f"  {self.error}"] if self.error else []
        if self.untrained:
            lines.append(f"  no gradient reaches {listed(self.untrained, 6)}")
        if not self.fell and self._falls:
            lines.append(f"  the loss was falling still: overfit_batches(..., updates={4 * self.updates})")
        elif not self.fell:
            rates = ", ".join(dict.fromkeys(map(rate, self.rates)))
            lines.append(f"  learning rate {rates}: try others by find_lr(trainer, train)")
            lines.append("  check that targets match inputs, that the loss reads the output, and that its minimum is 0")
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
    """Train on the same few batches, and return whether the loss fell to about zero; restore everything.

    Ends early when the loss is at most `share` of the first, twice in a row. Dropout is off, each batch is one update,
    and the learning rates are those of the optimizer, without a schedule. Restores the same state as `smoke_run`.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        batches: Number of batches, from the start of `train`.
        updates: Maximum number of updates.
        share: The share of the first loss that counts as zero.
        batch_size: As for `fit`.

    Raises:
        SettingError: With several ranks.
        DataError: For a stream.
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
    """Records the mean loss of each pass; stops the run near zero."""

    def __init__(self, batches: int, share: float) -> None:
        self.passes: list[float] = []
        self._batches, self._share = batches, share
        self._running: list[float] = []
        self.untrained: list[str] | None = None
        """Parameters without a gradient at every check so far; None before the first check."""

    def on_update(self, update: Update) -> None:
        self._running.append(update.loss)
        if len(self._running) == self._batches:
            self.passes.append(math.fsum(self._running) / self._batches)
            self._running = []

    def look(self, trainer: Trainer[Any]) -> None:
        """Record parameters without gradients; stop if the last two passes were near zero."""
        if self.untrained != []:
            names = _untrained(trainer)
            self.untrained = [name for name in names if self.untrained is None or name in self.untrained]
        low = [loss <= self._share * self.passes[0] for loss in self.passes[-2:]]
        if len(self.passes) > 2 and all(low):
            trainer.stop("near zero")


def _untrained(trainer: Trainer[Any]) -> tuple[str, ...]:
    named = [(name, one) for name, one in trainer.model.named_parameters() if one.requires_grad]
    return tuple(name for name, one in named if one.grad is None or not one.grad.any())
