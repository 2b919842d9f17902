"""The Trainer of transformers with a model of one's own, as its documentation writes it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from programs import common

PACKAGE = "transformers"
SCRIPT_IMPORTS = "from transformers import Trainer, TrainingArguments"


class Named(Dataset[dict[str, Tensor]]):
    """Rows as dictionaries, which the Trainer asks for."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.data[index]
        return {"inputs": x, "labels": y}


class WithLoss(nn.Module):
    """A model that returns its loss where it is given labels, which the Trainer asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scores, with labels the loss too."""
        output = self.model(inputs)
        if labels is None:
            return {"logits": output}
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


def counted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func`, as the guide's section on loss scaling asks for."""
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(outputs["logits"], labels)
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def accuracy(predicted: Any) -> dict[str, float]:
    """A `compute_metrics`."""
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def constant(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer with a constant rate: the Trainer's own schedule is linear."""
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """`save_strategy`, `get_last_checkpoint` and `resume_from_checkpoint`, as in the example scripts."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            log.epoch(int(state.epoch))

    saving = {"save_strategy": "epoch"} if every is None else {"save_strategy": "steps", "save_steps": every}
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=common.EPOCHS,
        per_device_train_batch_size=common.SIZE,
        learning_rate=1e-3,
        seed=common.SEED,
        use_cpu=True,
        report_to="none",
        **saving,
    )
    set_seed(common.SEED)
    model = common.noisy_model()
    trainer = Trainer(WithLoss(model), arguments, train_dataset=Named(common.killed_data()), callbacks=[Epochs])
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    log.ended(model)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, size: int, **settings: Any) -> None:
    """Train one epoch in the data's order, at a constant rate and without clipping, else with the defaults."""
    from transformers import Trainer, TrainingArguments

    loss = settings.pop("compute_loss_func", None)
    with tempfile.TemporaryDirectory() as root:
        arguments = TrainingArguments(
            root,
            num_train_epochs=1,
            per_device_train_batch_size=size,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to="none",
            **settings,
        )
        Trainer(
            WithLoss(model),
            arguments,
            train_dataset=Named(data),
            optimizers=constant(optimizer),
            compute_loss_func=loss,
        ).train()


COUNTED = "with a `compute_loss_func`"


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    found = {}
    for name, loss in (("default", None), (COUNTED, counted_loss)):
        found[name] = model = common.digits_model().double()
        settings = {"gradient_accumulation_steps": common.ACCUMULATE_ROWS, "max_grad_norm": 0.0}
        fit(model, common.sgd(model), common.exact_digits(), 32, compute_loss_func=loss, **settings)
    return found


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows for a language model of transformers, which shifts the targets itself."""

    def __init__(self) -> None:
        self.tokens, _ = common.sentences().tensors

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "labels": row.masked_fill(row == 0, -100)}


def llama() -> Any:
    """A tiny language model of transformers in float64, always with the same first weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(common.SEED)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=17, **sizes)).double()


def language_model() -> tuple[Any, Any, Any]:
    """A language model after a plain loop over big batches, as it began, and after the Trainer with accumulation."""
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    reference, begun, model = llama(), llama(), llama()
    optimizer = common.sgd(reference)
    for batch in DataLoader(Sentences(), 8 * common.ACCUMULATE_TOKENS):
        optimizer.zero_grad()
        reference(**batch).loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as root:
        arguments = TrainingArguments(
            root,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=common.ACCUMULATE_TOKENS,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to="none",
        )
        Trainer(model, arguments, train_dataset=Sentences(), optimizers=constant(common.sgd(model))).train()
    return reference, begun, model


def tokens() -> dict[str, Any]:
    """Four micro-batches per update, with unequal numbers of tokens; also a language model of transformers' own."""
    found: dict[str, Any] = {}
    for name, loss in (("default", None), (COUNTED, counted_loss)):
        found[name] = model = common.tagger()
        settings = {"gradient_accumulation_steps": common.ACCUMULATE_TOKENS, "max_grad_norm": 0.0}
        fit(model, common.sgd(model, 1.0), common.sentences(), 8, compute_loss_func=loss, **settings)
    return found | {"with a model of transformers": language_model()}


def validation() -> dict[str, dict[str, float]]:
    """`Trainer.evaluate` with `compute_metrics`."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as root:
        arguments = TrainingArguments(root, per_device_eval_batch_size=32, use_cpu=True, report_to="none")
        model, held_out = WithLoss(common.trained_digits()), Named(common.digits()[1])
        numbers = Trainer(model, arguments, eval_dataset=held_out, compute_metrics=accuracy).evaluate()
    return {"default": {"loss": numbers["eval_loss"], "accuracy": numbers["eval_accuracy"]}}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch."""
    model, found = common.digits_model(), dict[str, Any]()
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        fit(model, optimizer, common.with_a_nan(), 32)
    return found


def monitor() -> dict[str, Any]:
    """Early stopping on a misspelt name."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    model, found = common.digits_model(), dict[str, Any]()
    train, held_out = (Named(data) for data in common.digits())
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found), tempfile.TemporaryDirectory() as root:
        arguments = TrainingArguments(
            root,
            num_train_epochs=3,
            per_device_train_batch_size=32,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model=common.MONITOR.removeprefix("val_"),
            use_cpu=True,
            report_to="none",
        )
        Trainer(
            WithLoss(model),
            arguments,
            train_dataset=train,
            eval_dataset=held_out,
            compute_metrics=accuracy,
            optimizers=constant(optimizer),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        ).train()
    return found
