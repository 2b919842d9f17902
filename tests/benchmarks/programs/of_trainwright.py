"""This package, as its README and pages write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from programs import common

PACKAGE = "trainwright"
SCRIPT_IMPORTS = "from trainwright import Trainer"


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """A checkpoint slot and `resume="auto"`."""
    import torch

    from trainwright import Checkpoint, Observer, Trainer, Updates

    class Saves(Observer):
        def on_save(self, saved: Any) -> None:
            log.saved(saved.update)

    class Logged(Trainer[nn.Module]):
        logged = -1

        def after_update(self) -> None:  # begin_epoch is also called for the epochs before the checkpoint
            if self.progress.epoch != self.logged:
                self.logged = self.progress.epoch
                log.epoch(self.logged)

    torch.manual_seed(common.SEED)
    model = common.noisy_model()
    checkpoint = Checkpoint(folder) if every is None else Checkpoint(folder, every=Updates(every))
    trainer = Logged(model, common.adam(model), nn.CrossEntropyLoss(), checkpoint=checkpoint, observers=[Saves()])
    log.background = True  # it goes on training while it saves
    loader = common.loader(common.killed_data(), common.SIZE, shuffle=True)
    trainer.fit(loader, epochs=common.EPOCHS, resume="auto")
    log.ended(model)


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    from trainwright import Trainer

    model = common.digits_model().double()
    trainer = Trainer(model, common.sgd(model), nn.CrossEntropyLoss(), accumulate=common.ACCUMULATE_ROWS)
    trainer.fit(common.loader(common.exact_digits()), epochs=1)
    return {"default": model}


def tokens() -> dict[str, nn.Module]:
    """Four micro-batches per update, with unequal numbers of tokens."""
    from trainwright import Trainer

    model = common.tagger()
    trainer = Trainer(model, common.sgd(model, 1.0), nn.CrossEntropyLoss(), accumulate=common.ACCUMULATE_TOKENS)
    trainer.fit(common.loader(common.sentences(), 8), epochs=1)
    return {"default": model}


def validation() -> dict[str, dict[str, float]]:
    """`evaluate` under torchrun."""
    from trainwright import Trainer, accuracy

    trainer = Trainer(common.trained_digits(), None, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy})
    numbers = trainer.evaluate(common.loader(common.digits()[1]))
    return {"default": {"loss": numbers["val_loss"], "accuracy": numbers["val_accuracy"]}}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch."""
    from trainwright import Trainer

    model, found = common.digits_model(), dict[str, Any]()
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        Trainer(model, optimizer, nn.CrossEntropyLoss()).fit(common.loader(common.with_a_nan()), epochs=1)
    return found


def monitor() -> dict[str, Any]:
    """Early stopping on a misspelt name."""
    from trainwright import EarlyStopping, Trainer, accuracy

    model, found = common.digits_model(), dict[str, Any]()
    train, held_out = (common.loader(data) for data in common.digits())
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        stopping = EarlyStopping(common.MONITOR, mode="max", patience=3)
        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, early_stopping=stopping
        )
        trainer.fit(train, held_out, epochs=3)
    return found
