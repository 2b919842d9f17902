"""Lightning with everything off and at its defaults, and Lightning Fabric."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from contestants.entry import Contestant, scratch
from contestants.loops import evaluation
from contestants.tasks import Clock, Drawn, Task

OFF = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module_of(task: Task, clock: Clock | None = None) -> Any:
    """Return the LightningModule that its guide writes."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.criterion = task.model(), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, target = batch
            return self.criterion(self.model(inputs), target)

        def validation_step(self, batch: Any, _: int) -> None:
            inputs, target = batch
            self.log("val_loss", self.criterion(self.model(inputs), target))

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer(self.model)
            scheduler = task.scheduler(optimizer)
            if scheduler is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_end(self) -> None:
            assert clock is not None
            clock.epoch_ended()

    return Module()


def train_lightning(task: Task, clock: Clock, *, off: bool) -> nn.Module:
    import lightning

    module = module_of(task, clock)
    with tempfile.TemporaryDirectory() as root:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1 + task.epochs,
            accumulate_grad_batches=task.accumulate,
            gradient_clip_val=task.clip,
            default_root_dir=root,
            **(OFF if off else {}),
        )
        trainer.fit(module, task.loader())
    return module.model


def evaluation_lightning(task: Task, *, off: bool) -> Callable[[], float]:
    import lightning

    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=scratch(), **(OFF if off else {}))
    module, loader = module_of(task), task.held_out()
    return lambda: trainer.validate(module, loader, verbose=not off)[0]["val_loss"]


def fabric() -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def train_fabric(task: Task, clock: Clock) -> nn.Module:
    own = fabric()
    own.launch()
    original = task.model()
    model, optimizer = own.setup(original, task.optimizer(original))
    scheduler, criterion = task.scheduler(optimizer.optimizer), nn.CrossEntropyLoss()
    loader = own.setup_dataloaders(task.loader())
    model.train()
    for _ in range(1 + task.epochs):
        total, rows = 0.0, 0
        for number, (inputs, target) in enumerate(loader, 1):
            loss = criterion(model(inputs), target)
            own.backward(loss if scheduler is None else loss / task.accumulate)
            total += loss.item() * len(inputs)
            rows += len(inputs)
            if number % task.accumulate == 0:
                if scheduler is not None:
                    own.clip_gradients(model, optimizer, max_norm=task.clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
        own.print(f"loss {total / rows:.4f}")
        clock.epoch_ended()
    return original


def evaluation_fabric(task: Task) -> Callable[[], float]:
    own = fabric()
    model, loader = own.setup(task.model()), own.setup_dataloaders(task.held_out())
    return evaluation(model, loader, task.criterion())


CONTESTANTS = [
    Contestant(
        "lightning-off",
        partial(train_lightning, off=True),
        partial(evaluation_lightning, off=True),
        order=Drawn,
        package="lightning",
        note="no logger, checkpoints, progress bar or model summary",
    ),
    Contestant(
        "lightning",
        partial(train_lightning, off=False),
        partial(evaluation_lightning, off=False),
        order=Drawn,
        package="lightning",
        note="its defaults",
    ),
    Contestant("fabric", train_fabric, evaluation_fabric, package="lightning", note="the loop of its guide"),
]
