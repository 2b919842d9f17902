"""Writes the golden checkpoint of the current format, once for each: `python tests/checkpointing/make_golden.py`.

A run with dropout, a schedule, an average, clipping, metrics and early stopping is saved inside its second epoch. The
weights at its end lie beside the checkpoint. Later versions must resume from it, or refuse it by name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import nn

from trainwright import (
    EMA,
    Checkpoint,
    EarlyStopping,
    OneCycle,
    Result,
    Trainer,
    Updates,
    accuracy,
    batches,
    save_weights,
)
from trainwright.checkpointing.format import FORMAT_VERSION

GOLDEN = Path(__file__).with_name("golden")
SAVED_AT, EPOCHS = 7, 3


def data(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers that no generator of a library makes."""
    rows = torch.arange(first * 4, last * 4, dtype=torch.float32).reshape(-1, 4)
    x = torch.sin(rows * 0.7)
    return x, (x.sum(1) > 0).long()


def fit(directory: Path, *, resume: str | None = None) -> tuple[Result, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
        average=EMA(0.9),
        early_stopping=EarlyStopping("val_loss", patience=10, restore_best=False),
        checkpoint=Checkpoint(directory, best="val_loss", every=Updates(SAVED_AT), keep="all"),
        device="cpu",
        console=False,
    )
    train, val = batches(data(0, 40), 8, shuffle=True, seed=1), batches(data(40, 60), 20)
    return trainer.fit(train, val, epochs=EPOCHS, resume=resume), model


def main() -> None:
    folder, scratch = GOLDEN / f"format-{FORMAT_VERSION}", GOLDEN / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    result, model = fit(scratch)
    saved = f"update-{SAVED_AT:010}"
    shutil.copytree(scratch / saved, folder / saved)
    shutil.rmtree(scratch)
    save_weights(folder / "end.safetensors", model.state_dict())
    (folder / "history.json").write_text(json.dumps(result.history, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
