"""The default evaluation step with cross entropy, in as few calls as in a loop by hand: sums read, targets counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.records import StepOutput
from trainwright.protocols import Source
from trainwright.update.batches import call, split
from trainwright.update.loss_tracker import FEW, Ledger
from trainwright.update.losses import KnownLoss
from trainwright.update.owner import Owner

_FLOAT32, _INT64 = torch.float32, torch.int64


def summing(owner: Owner, ledger: Ledger, source: Source, *, first: Any, cut: bool) -> Callable[[Any], None] | None:
    """What runs the default step with a batch and takes down its numbers; None where anything is the user's own.

    `first`: the batch that the pass over `source` has begun with; `cut`: whether it may end before the data do.
    """
    hooks, known = owner.hooks, owner.hooks.known
    own = hooks.validates_itself or hooks.split is not split or "validation_step" in vars(owner)
    if own or known is None or known.kernel is None or hooks.summed is None:
        return None
    if owner.precision is not None or owner.world.size > 1:  # of several processes one may run what does not count
        return None
    ledger.known = known
    lasting = bool(getattr(source, "in_memory", False)) and ledger.meters is None  # a metric may write into targets
    whole = _all_targets(source, first) if lasting and not cut else None
    if whole is None:
        return _each_counted(owner, ledger, known, lasting=lasting)
    ledger.targets.append(whole)
    return _counted_already(owner.model, ledger, known)


def _all_targets(source: Source, first: Any) -> Tensor | None:
    """All targets of a pass, where its batches are parts of columns that were gathered for it at once; else None."""
    if type(first) not in (list, tuple) or len(first) != 2 or source.rows is None:
        return None
    target = first[1]
    if target.dtype is not _INT64 or target.ndim != 1 or not target.is_cpu:
        return None
    gathered = target.untyped_storage()
    if gathered.nbytes() != source.rows * target.element_size():
        return None
    return torch.empty(0, dtype=_INT64).set_(gathered)


def _counted_already(model: Any, ledger: Ledger, known: KnownLoss) -> Callable[[Any], None]:
    """For batches that are alike in all but their rows, and whose targets are counted together."""
    kernel, value, take_down = known.kernel, host_reads.host_value, ledger.read_totals.append
    assert kernel is not None

    def take(batch: Any) -> None:
        inputs, target = batch
        output = model(inputs)
        if type(output) is Tensor and output.dtype is _FLOAT32:
            take_down(value(kernel(output, target)))
        else:
            take_down(value(known.total(output, target)))

    return take


def _each_counted(owner: Owner, ledger: Ledger, known: KnownLoss, *, lasting: bool) -> Callable[[Any], None]:
    """For any batches; `lasting`: whether nobody will write into their targets any more."""
    model, summed, rows, kernel = owner.model, known.summed, owner.hooks.rows, known.kernel
    read, targets = ledger.read_totals, ledger.targets
    feed = None if ledger.meters is None else ledger.meters.update
    assert kernel is not None

    def take(batch: Any) -> None:
        kind = type(batch)
        if (kind is list or kind is tuple) and len(batch) == 2:  # as `split` does
            inputs, target = batch
            output = model(inputs)
        else:
            inputs, target = split(batch)
            output = model(*inputs) if type(inputs) is tuple else call(model, inputs)
        if not _is_quick(output, target):
            loss = summed(output, target)
            ledger.note(loss if feed is None else StepOutput(loss, output, target))
            return
        read.append(host_reads.host_value(kernel(output, target)))
        # Whoever gives the batches may write the next one into the same memory.
        targets.append(target if lasting else target.clone())
        if feed is not None:
            feed(output, target, rows(batch))

    return take


def _is_quick(output: Any, target: Any) -> bool:
    """Whether the kernel takes them as they are: plain tensors on the CPU, a few rows, one class number each."""
    if type(output) is not Tensor or type(target) is not Tensor or not output.is_cpu or not target.is_cpu:
        return False
    return output.dtype is _FLOAT32 and target.dtype is _INT64 and target.ndim == 1 and target.numel() <= FEW
