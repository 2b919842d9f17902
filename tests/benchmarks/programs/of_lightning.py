"""Lightning, as its documentation writes it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from programs import common

PACKAGE = "lightning"
SCRIPT_IMPORTS = "import lightning"


def module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The LightningModule: a training step, and a validation step that logs with `sync_dist=True`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y)

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            output = self.model(x)
            numbers = {
                "val_loss": nn.functional.cross_entropy(output, y),
                "val_accuracy": (output.argmax(1) == y).float().mean(),
            }
            self.log_dict(numbers, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return optimizer

    return Module()


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """`ModelCheckpoint(save_last=True)` in a folder of its own and `ckpt_path="last"`."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Epochs(Callback):
        def on_train_epoch_start(self, trainer: Any, _: Any) -> None:
            log.epoch(trainer.current_epoch)

    lightning.seed_everything(common.SEED)
    model = common.noisy_model()
    saving = ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=every)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=common.EPOCHS, callbacks=[saving, Epochs()], default_root_dir=folder.parent
    )
    loader = common.loader(common.killed_data(), common.SIZE, shuffle=True)
    trainer.fit(module(model, common.adam(model)), loader, ckpt_path="last")
    log.ended(model)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: Any, epochs: int = 1, **settings: Any) -> None:
    """Train with the defaults and these settings."""
    import lightning

    with tempfile.TemporaryDirectory() as root:
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, default_root_dir=root, **settings)
        trainer.fit(module(model, optimizer), *loaders)


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    model = common.digits_model().double()
    loader = common.loader(common.exact_digits())
    fit(model, common.sgd(model), loader, accumulate_grad_batches=common.ACCUMULATE_ROWS)
    return {"default": model}


def tokens() -> dict[str, nn.Module]:
    """Four micro-batches per update, with unequal numbers of tokens."""
    model = common.tagger()
    loader = common.loader(common.sentences(), 8)
    fit(model, common.sgd(model, 1.0), loader, accumulate_grad_batches=common.ACCUMULATE_TOKENS)
    return {"default": model}


def validation() -> dict[str, dict[str, float]]:
    """`Trainer.validate` with the strategy "ddp"."""
    import lightning

    model = common.trained_digits()
    with tempfile.TemporaryDirectory() as root:
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", default_root_dir=root)
        [numbers] = trainer.validate(module(model, common.adam(model)), common.loader(common.digits()[1]))
    return {"default": {"loss": numbers["val_loss"], "accuracy": numbers["val_accuracy"]}}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch."""
    model, found = common.digits_model(), dict[str, Any]()
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        fit(model, optimizer, common.loader(common.with_a_nan()))
    return found


def monitor() -> dict[str, Any]:
    """Early stopping on a misspelt name."""
    from lightning.pytorch.callbacks import EarlyStopping

    model, found = common.digits_model(), dict[str, Any]()
    train, held_out = (common.loader(data) for data in common.digits())
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        stopping = EarlyStopping(common.MONITOR, mode="max", patience=3)
        fit(model, optimizer, train, held_out, epochs=3, callbacks=[stopping])
    return found
