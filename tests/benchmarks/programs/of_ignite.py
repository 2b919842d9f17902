"""Ignite, as its documentation and examples write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from programs import common

PACKAGE = "pytorch-ignite"
SCRIPT_IMPORTS = "from ignite.engine import Events, create_supervised_trainer"


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """`Checkpoint` of model, optimizer and trainer with a `DiskSaver`, and `load_objects`."""
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.utils import manual_seed

    manual_seed(common.SEED)
    model = common.noisy_model()
    optimizer = common.adam(model)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saving = Checkpoint(to_save, DiskSaver(str(folder), require_empty=False), n_saved=2)
    when = Events.EPOCH_COMPLETED if every is None else Events.ITERATION_COMPLETED(every=every)
    trainer.add_event_handler(when, saving)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: log.epoch(engine.state.epoch - 1))
    found = sorted(folder.glob("checkpoint_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if found:
        Checkpoint.load_objects(to_load=to_save, checkpoint=str(found[-1]))
    loader = common.loader(common.killed_data(), common.SIZE, shuffle=True)
    trainer.run(loader, max_epochs=common.EPOCHS)
    log.ended(model)


def accumulated(model: nn.Module, optimizer: Any, loader: Any, accumulate: int) -> nn.Module:
    """One epoch of the supervised trainer with its own accumulation."""
    from ignite.engine import create_supervised_trainer

    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion, gradient_accumulation_steps=accumulate)
    trainer.run(loader, max_epochs=1)
    return model


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    model, loader = common.digits_model().double(), common.loader(common.exact_digits())
    return {"default": accumulated(model, common.sgd(model), loader, common.ACCUMULATE_ROWS)}


def tokens() -> dict[str, nn.Module]:
    """Four micro-batches per update, with unequal numbers of tokens."""
    model, loader = common.tagger(), common.loader(common.sentences(), 8)
    return {"default": accumulated(model, common.sgd(model, 1.0), loader, common.ACCUMULATE_TOKENS)}


def validation() -> dict[str, dict[str, float]]:
    """`auto_model`, `auto_dataloader`, and metrics of the supervised evaluator."""
    import ignite.distributed as idist
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Accuracy, Loss

    idist.initialize("gloo")
    model = idist.auto_model(common.trained_digits())
    size = 32 * idist.get_world_size()  # `auto_dataloader` divides it by the number of processes
    loader = idist.auto_dataloader(common.digits()[1], batch_size=size, shuffle=False)
    metrics = {"accuracy": Accuracy(), "loss": Loss(nn.CrossEntropyLoss())}
    numbers = create_supervised_evaluator(model, metrics=metrics).run(loader).metrics
    idist.finalize()
    return {"default": {"loss": numbers["loss"], "accuracy": numbers["accuracy"]}}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch; `TerminateOnNan` is a handler that the user adds."""
    from ignite.engine import create_supervised_trainer

    model, found = common.digits_model(), dict[str, Any]()
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
        trainer.run(common.loader(common.with_a_nan()), max_epochs=1)
    return found


def monitor() -> dict[str, Any]:
    """Early stopping whose score function reads a misspelt name."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EarlyStopping
    from ignite.metrics import Accuracy

    model, found = common.digits_model(), dict[str, Any]()
    train, held_out = (common.loader(data) for data in common.digits())
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
        evaluator = create_supervised_evaluator(model, metrics={"val_accuracy": Accuracy()})
        stopping = EarlyStopping(3, lambda engine: engine.state.metrics[common.MONITOR], trainer)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(held_out))
        trainer.run(train, max_epochs=3)
    return found
