"""Other training libraries, from the same ready batches on the device: Lightning, Accelerate, the Trainer of HF."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpu_cases.entry import Clock, Contestant, Task

OFF = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
LIGHTNING = "lightning" if find_spec("lightning") else "pytorch_lightning"
"""The package, or its twin of the older name."""
HF_OFF = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def same(batch: Any) -> Any:
    return batch


def loader(data: Sequence[Any]) -> DataLoader[Any]:
    """What gives ready batches, for libraries that want a DataLoader."""
    return DataLoader(list(data), batch_size=None, collate_fn=same)  # type: ignore[arg-type]


def train_lightning(task: Task, clock: Clock, *, off: bool) -> nn.Module:
    lightning = import_module(LIGHTNING)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = task.loss(self.model, batch)
            if not off:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return task.optimizer(self.model.parameters(), fused=True)

        def on_train_epoch_end(self) -> None:
            clock.epoch_ended()

    module = Module()
    settings: dict[str, Any] = {
        "accelerator": "gpu" if task.bench.on_cuda else "cpu",
        "precision": "bf16-mixed" if task.precision == "bf16" else "32-true",
        "gradient_clip_val": task.clip,
        **(OFF if off else {}),
    }
    with tempfile.TemporaryDirectory() as root:
        trainer = lightning.Trainer(max_epochs=1 + task.epochs, devices=1, default_root_dir=root, **settings)
        trainer.fit(module, loader(task.data))
    return module.model


def train_accelerate(task: Task, clock: Clock) -> nn.Module:
    from accelerate import Accelerator

    forget()
    own = Accelerator(cpu=not task.bench.on_cuda, mixed_precision=task.precision or "no")
    original = task.model()
    model, optimizer = own.prepare(original, task.optimizer(original.parameters(), fused=True))
    for _ in range(1 + task.epochs):
        losses = []
        for batch in task.data:
            loss = task.loss(model, batch)
            own.backward(loss)
            if task.clip is not None:
                own.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
        clock.epoch_ended()
    return original


def forget() -> None:
    """Let a new precision be chosen: Accelerate holds one for the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.task = task.model(), task

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        return {"loss": self.task.loss(self.model, (first, second))}


def train_transformers(task: Task, clock: Clock) -> nn.Module:
    import transformers

    forget()
    named = [{"first": first, "second": second} for first, second in task.data]

    class Ready(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader(named)

    class EpochEnds(transformers.TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            clock.epoch_ended()

    with tempfile.TemporaryDirectory() as root:
        settings = transformers.TrainingArguments(
            root,
            num_train_epochs=1 + task.epochs,
            max_grad_norm=task.clip or 0.0,
            bf16=task.precision == "bf16",
            use_cpu=not task.bench.on_cuda,
            **HF_OFF,
        )
        model = WithLoss(task)
        optimizer = task.optimizer(model.parameters(), fused=True)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        own = Ready(model, settings, train_dataset=named, optimizers=(optimizer, constant), callbacks=[EpochEnds])
        own.train()
    return model.model


PEERS = [
    Contestant(
        "lightning-off",
        partial(train_lightning, off=True),
        package=LIGHTNING,
        note="nothing logged, no checkpoints, progress bar or summary",
    ),
    Contestant(
        "lightning", partial(train_lightning, off=False), package=LIGHTNING, note="its defaults, the loss logged"
    ),
    Contestant("accelerate", train_accelerate, package="accelerate", note="the loop of its guide, tuned"),
    Contestant("hf-trainer", train_transformers, package="transformers", note="no logging, saving or progress bar"),
]
NAMES = tuple(one.name for one in PEERS)
