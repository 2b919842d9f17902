"""World: what was not given alike to the processes of a run is refused on all of them, before any of them waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed.pool import pool
from trainwright import Checkpoint, Epochs, SettingError, Trainer, Updates, accuracy, batches
from trainwright.data import sharded

from .world_runs import rows_of_classes


def data(rows: int = 12, size: int = 4) -> Any:
    return batches(rows_of_classes(rows), size)


def ready(rows: int) -> list[Any]:
    return list(zip(*(column.split(4) for column in rows_of_classes(rows)), strict=True))


def unlike(kind: str) -> str:
    rank = torch.distributed.get_rank()
    outputs = 3 + rank if kind == "model" else 3
    model = nn.Linear(5, outputs).double()
    settings: dict[str, dict[str, Any]] = {
        "accumulate": {"accumulate": 1 + rank},
        "clip": {"clip": None if rank else 1.0},
        "metrics": {"metrics": {"accuracy": accuracy} if rank else None},
        "checkpoint": {"checkpoint": None if rank else Checkpoint("never")},
    }
    train: dict[str, Any] = {
        "rows": data(12 + 4 * rank),
        "batch size": data(12, 4 + rank),
        "loader": DataLoader(TensorDataset(*rows_of_classes(12 + 4 * rank)), 4),
        "list": ready(12 + 4 * rank),
        "one stream": sharded(lambda epoch: ready(12)) if rank else data(),
    }
    val = {"val": data() if rank else None, "names": {"a" if rank else "b": data()}}
    ends: dict[str, Any] = {"epochs": 1 + rank if kind == "ends" else 1}
    if kind == "validate":
        ends["validate"] = Epochs(1) if rank else Updates(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings.get(kind, {}))
    with pytest.raises(SettingError) as caught:
        trainer.fit(train.get(kind, data()), val.get(kind), **ends)
    return str(caught.value)


KINDS = {
    "rows": ("training data", "rank 0: 3 batches, 12 rows, 4 rows in a batch; rank 1: 4 batches, 16 rows"),
    "batch size": ("training data", "4 rows in a batch; rank 1: 3 batches, 12 rows, 5 rows in a batch"),
    "loader": ("training data", "rank 0: 3 batches, 12 rows"),
    "list": ("training data", "rank 0: 3 batches; rank 1: 4 batches"),
    "one stream": ("training data", "rank 1: batches without a length"),
    "val": ("validation data", "rank 0: none; rank 1: val: 3 batches"),
    "names": ("validation data", "rank 0: val_b: 3 batches"),
    "ends": ("ends", "rank 0: epochs=1"),
    "validate": ("ends", "validate=Updates(n=1), validate_at_start=False; rank 1"),
    "model": ("model", "rank 0: Linear of 18 numbers in 2 tensors"),
    "accumulate": ("accumulate", "rank 0: 1; rank 1: 2"),
    "clip": ("clip", "rank 0: 1.0; rank 1: None"),
    "metrics": ("metrics", "rank 0: none; rank 1: accuracy"),
    "checkpoint": ("checkpoint", "rank 0: Checkpoint; rank 1: none"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_process_was_given_otherwise_is_named_on_all(kind: str) -> None:
    name, have = KINDS[kind]
    texts = pool(2).run(unlike, kind)
    assert all(f"not given the same {name}\n" in text and have in text for text in texts), texts[0]


def streams() -> int:
    """Parts of a stream have lengths of their own."""
    rank = torch.distributed.get_rank()
    model = nn.Linear(5, 3).double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    return trainer.fit(sharded(ready(8 + 4 * rank)), sharded(lambda epoch: ready(4 + 4 * rank)), epochs=1).updates


def test_parts_of_a_stream_may_differ() -> None:
    assert pool(2).run(streams) == [3, 3]
