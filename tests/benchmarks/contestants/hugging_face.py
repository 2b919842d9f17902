"""Accelerate and the Trainer of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from contestants.entry import Contestant, scratch
from contestants.loops import evaluation
from contestants.tasks import Clock, Drawn, Task, generator


def accelerator(task: Task) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate)


def train_accelerate(task: Task, clock: Clock) -> nn.Module:
    own = accelerator(task)
    original = task.model()
    optimizer = task.optimizer(original)
    scheduler = task.scheduler(optimizer)
    model, optimizer, loader = own.prepare(original, optimizer, task.loader())
    scheduler = None if scheduler is None else own.prepare(scheduler)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _ in range(1 + task.epochs):
        total, rows = 0.0, 0
        for inputs, target in loader:
            with own.accumulate(model):
                loss = criterion(model(inputs), target)
                own.backward(loss)
                if own.sync_gradients and task.clip is not None:
                    own.clip_grad_norm_(model.parameters(), task.clip)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            total += loss.item() * len(inputs)
            rows += len(inputs)
        own.print(f"loss {total / rows:.4f}")
        clock.epoch_ended()
    return original


def evaluation_accelerate(task: Task) -> Callable[[], float]:
    own = accelerator(task)
    model, loader = own.prepare(task.model(), task.held_out())
    return evaluation(model, loader, task.criterion())


class Named(Dataset[dict[str, Tensor]]):
    """Rows as the Trainer of transformers wants them."""

    def __init__(self, task: Task) -> None:
        self.inputs, self.targets = task.inputs, task.targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.criterion(self.model(inputs), labels)}


def transformers_trainer(task: Task, clock: Clock | None, root: str) -> Any:
    import transformers

    class Ordered(transformers.Trainer):  # its own sampler is seeded otherwise
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, task.size, shuffle=True, generator=generator())

    class EpochEnds(transformers.TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            assert clock is not None
            clock.epoch_ended()

    settings = transformers.TrainingArguments(
        root,
        num_train_epochs=1 + task.epochs,
        per_device_train_batch_size=task.size,
        per_device_eval_batch_size=task.size,
        gradient_accumulation_steps=task.accumulate,
        max_grad_norm=task.clip or 0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer) or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Ordered(
        WithLoss(model),
        settings,
        train_dataset=Named(task),
        eval_dataset=Named(task),
        optimizers=(optimizer, scheduler),
        callbacks=[EpochEnds],
    )


def train_transformers(task: Task, clock: Clock) -> nn.Module:
    with tempfile.TemporaryDirectory() as root:
        trainer = transformers_trainer(task, clock, root)
        trainer.train()
    return trainer.model.model


def evaluation_transformers(task: Task) -> Callable[[], float]:
    trainer = transformers_trainer(task, None, scratch())
    return lambda: trainer.evaluate()["eval_loss"]


CONTESTANTS = [
    Contestant(
        "accelerate", train_accelerate, evaluation_accelerate, package="accelerate", note="the loop of its guide"
    ),
    Contestant(
        "hf-trainer",
        train_transformers,
        evaluation_transformers,
        order=Drawn,
        package="transformers",
        note="no logging, saving or progress bar; rows as dicts",
    ),
]
