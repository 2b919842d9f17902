"""Refuses a run that was not given alike to its processes, before they wait for each other in different places."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields

from torch import nn

from trainwright.core.errors import SettingError, message
from trainwright.fit.plan import Ends
from trainwright.fit.setup import settings_of
from trainwright.protocols import Source
from trainwright.update.owner import Owner

_DEVICE = re.compile(r"\b([a-z]+):\d+\b")
_DATA = ("training data", "validation data")


def check_alike(owner: Owner, source: Source, val: Mapping[str, Source], *, ends: Ends, resumes: bool) -> None:
    """Raise SettingError on every process where one was given other data, ends, settings or another model.

    Compared is what can be without reading a row: lengths, rows, batch sizes, the texts of settings, shapes.
    """
    if owner.world.size == 1:
        return
    given = {
        **_settings(owner),
        "model": _layout(owner.model),
        "training data": _sizes(source),
        "validation data": ", ".join(f"{name}: {_sizes(one)}" for name, one in val.items()) or "none",
        "ends": _ends(ends),
        "resume": "a resume" if resumes else "none",
    }
    first, *others = owner.world.gather(given)
    for rank, other in enumerate(others, start=1):
        for name in first:
            if first[name] != other[name]:
                raise _unlike(name, first[name], other[name], rank=rank)


def _unlike(name: str, first: str, other: str, *, rank: int) -> SettingError:
    apart = "Trainer(..., parallel=None) for runs apart"
    same = "one script that does the same on every process"
    own = "sharded(data) for data that are each process's own part"
    return SettingError(
        message(
            f"the processes of this run were not given the same {name}",
            have=f"rank 0: {first}; rank {rank}: {other}",
            want="the same on every process, which runs its own rows of every batch",
            fix=f"{own if name in _DATA else same}, or {apart}",
        )
    )


def _ends(ends: Ends) -> str:
    values = {field.name: getattr(ends, field.name) for field in fields(ends)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _settings(owner: Owner) -> dict[str, str]:
    texts = {name: _DEVICE.sub(r"\1", text) for name, text in settings_of(owner).items()}
    texts["metrics"] = ", ".join(owner.metrics or ()) or "none"
    texts["checkpoint"] = "none" if owner.checkpoint is None else type(owner.checkpoint).__name__
    return texts


def _sizes(source: Source) -> str:
    """What is known of the size of data; nothing of a stream, each process's part of which has its own."""
    if source.length is None:
        return "batches without a length"
    known = {"batches": source.length, "rows": source.rows, "rows in a batch": source.batch_size}
    return ", ".join(f"{n} {name}" for name, n in known.items() if n is not None)


def _layout(model: nn.Module) -> str:
    """Names, shapes and types of all weights in a short text that tells others apart."""
    weights = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in weights]
    numbers = sum(one.numel() for _, one in weights)
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return f"{type(model).__qualname__} of {numbers:,} numbers in {len(weights)} tensors ({digest})"
