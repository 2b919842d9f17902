"""Help with names: "did you mean", names of other libraries, and errors for methods that nearly match a hook."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import CodeType
from typing import Any, TypeVar, cast

from trainwright.core.errors import NOTE, SettingError, message, user_line

C = TypeVar("C", bound=Callable[..., Any])

RESERVED = frozenset({"epoch", "grad_norm", "loss", "lr", "rows", "skipped", "update"})
"""Names of the numbers that every run reports: reserved, not for metrics, logged numbers or named losses."""

_BEGIN, _END, _AFTER = "def begin_epoch(self, epoch):", "def end_epoch(self, metrics):", "def after_update(self):"
_VALIDATE = 'def validation_step(self, batch):   # evaluate(data, name="test") calls it too'
FOREIGN_METHODS = {
    "configure_optimizers": "Trainer(model, torch.optim.AdamW(model.parameters()), loss)   # given, not returned",
    "forward": "def predict_step(self, batch):   # forward is the model's own",
    "train_epoch": "def update(self, window):   # fit makes the epochs; begin_epoch and end_epoch are around each",
    "before_update": "def update(self, window):   # your own code first, then return super().update(window)",
    "epoch_start": _BEGIN,
    **dict.fromkeys(("epoch_end", "training_epoch_end", "validation_epoch_end", "test_epoch_end"), _END),
    **dict.fromkeys(("val_step", "valid_step", "eval_step", "test_step", "prediction_step"), _VALIDATE),
}
"""Methods that other libraries call, with the code to write here instead."""

_FIT = "trainer.fit(train, val, epochs=10)   # data are given to fit"
_UPDATE = "def update(self, window):   # return super().update(window) makes the optimizer's step"
_MINIMIZE = "def update(self, window):   # self.minimize(loss) runs backward and makes the step"
_OPTIMIZER = "Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss)   # given, not returned"
_SLOTS = "Trainer(..., observers=[...], early_stopping=EarlyStopping(...), checkpoint=Checkpoint(...))"
_SCHEDULE = "Trainer(..., schedule=Cosine())"
_STATE = 'self.state["settings"] = {...}   # state is in every checkpoint'
FOREIGN_HELPERS = {
    **dict.fromkeys(("train_dataloader", "val_dataloader", "get_train_dataloader", "get_eval_dataloader"), _FIT),
    **dict.fromkeys(("test_dataloader", "get_test_dataloader", "evaluation_loop"), 'trainer.evaluate(test, "test")'),
    "predict_dataloader": "trainer.predict(data)",
    "prepare_data": "data = ...   # before trainer.fit(data, ...)",
    "setup": "def begin_epoch(self, epoch):   # epoch 0; or an __init__ of your own that calls super().__init__",
    "teardown": "result = trainer.fit(...)   # what follows this line; or on_fit_end(self, result) of an Observer",
    **dict.fromkeys(("optimizer_step", "optimizer_zero_grad"), _UPDATE),
    **dict.fromkeys(("lr_scheduler_step", "create_scheduler"), _SCHEDULE),
    **dict.fromkeys(("backward", "manual_backward"), _MINIMIZE),
    "configure_gradient_clipping": "Trainer(..., clip=ClipNorm(1.0))",
    **dict.fromkeys(("compute_loss", "compute_loss_func"), "def training_step(self, batch):   # return the loss"),
    "compute_metrics": 'Trainer(..., metrics={"accuracy": accuracy})',
    **dict.fromkeys(("create_optimizer", "create_optimizer_and_scheduler"), _OPTIMIZER),
    "configure_callbacks": _SLOTS,
    "save_hyperparameters": _STATE,
    "transfer_batch_to_device": "def to_device(self, batch):",
}
"""Methods that other libraries call, but user code may call too: an error if no code of the class calls them."""

_CONSOLE = "leave it out: the console has a bar; Trainer(..., console=False) has none"
_SAVES = 'trainer.save() in a hook; trainer.save_weights("model.safetensors") for the weights'
_LOADS = 'load_weights("runs/1", trainer.model); or trainer.fit(..., resume="runs/1")'
FOREIGN_ATTRIBUTES = {
    "test": 'trainer.evaluate(data, "test")',
    "validate": "trainer.evaluate(data)",
    **dict.fromkeys(("validating", "testing", "sanity_checking"), "trainer.evaluating, the name of the set"),
    "global_step": "trainer.progress.updates",
    **dict.fromkeys(("current_epoch", "epoch"), "trainer.progress.epoch"),
    "max_epochs": "trainer.fit(..., epochs=10)",
    **dict.fromkeys(("save_checkpoint", "save_model"), _SAVES),
    **dict.fromkeys(("load_checkpoint", "load_from_checkpoint", "load_weights", "load_model"), _LOADS),
    **dict.fromkeys(("log_dict", "log_metrics"), "self.log(name, value) for each number"),
    **dict.fromkeys(("lr_scheduler", "lr_schedulers", "scheduler"), "trainer.schedule"),
    **dict.fromkeys(("callbacks", "add_callback"), "Trainer(..., observers=[...]); trainer.observers has them"),
    "logger": 'Trainer(..., observers=[Journal("log.jsonl")])',
    **dict.fromkeys(("callback_metrics", "logged_metrics"), "trainer.history[-1]"),
    **dict.fromkeys(("backward", "manual_backward"), "self.minimize(loss), in update(self, window)"),
    **dict.fromkeys(("hparams", "save_hyperparameters"), _STATE),
    "estimated_stepping_batches": "trainer.plan(train, epochs=10).updates",
    "should_stop": 'trainer.stop("reason"), in a hook',
    **dict.fromkeys(("is_global_zero", "is_world_process_zero", "is_local_process_zero"), "trainer.is_main"),
    **dict.fromkeys(("global_rank", "local_rank", "rank"), "trainer.world.rank"),
    "world_size": "trainer.world.size",
    **dict.fromkeys(("train", "train_dataloader", "val_dataloader"), "trainer.fit(train, val, epochs=10)"),
    **dict.fromkeys(("tune", "lr_find"), "find_lr(trainer, train)"),
    "to": 'Trainer(..., device="cuda")',
    "forward": "self.model(x)",
    "lightning_module": "trainer.model",
}
"""Attributes of other libraries' trainers, with the name here."""

_BEST_VALUE = "result.best.value, of result = trainer.fit(...)"
FOREIGN_ATTRIBUTES_OF = {
    "Checkpoint": {
        **dict.fromkeys(("best_model_path", "best_path"), "result.best.path, of result = trainer.fit(...)"),
        **dict.fromkeys(("best_model_score", "best_score"), _BEST_VALUE),
        **dict.fromkeys(("last_model_path", "last_checkpoint"), 'latest_checkpoint("runs/1")'),
        **dict.fromkeys(("dirpath", "path", "save_dir"), "checkpoint.directory"),
        **dict.fromkeys(("save", "save_checkpoint"), "trainer.save(), in a hook"),
        **dict.fromkeys(("load", "load_checkpoint"), _LOADS),
    },
    "EarlyStopping": {
        **dict.fromkeys(("best", "best_score"), _BEST_VALUE),
        **dict.fromkeys(("stopped_epoch", "early_stop", "stopped"), "result.stopped, of result = trainer.fit(...)"),
    },
}
"""Attributes of objects of other libraries, by class of this library."""

_HOOKED = "class Mine(Trainer), whose training_step(self, batch) returns the loss"
_WATCHES = "from trainwright import Observer   # it watches; what changes a run is a slot or a hook of a Trainer"
_DATA = "trainer.fit(train, val, epochs=10): data are arrays, a DataLoader, a Dataset or batches(...)"
FOREIGN_NAMES = {
    **dict.fromkeys(("LightningModule", "Seq2SeqTrainer", "SupervisedTrainer"), _HOOKED),
    **dict.fromkeys(("LightningDataModule", "DataModule", "DataLoader"), _DATA),
    **dict.fromkeys(
        ("TrainingArguments", "TrainerConfig", "Config"), "Trainer(..., precision=...), fit(..., epochs=10)"
    ),
    **dict.fromkeys(("Callback", "TrainerCallback"), _WATCHES),
    "ModelCheckpoint": "from trainwright import Checkpoint",
    "EarlyStoppingCallback": "from trainwright import EarlyStopping",
    **dict.fromkeys(("ProgressBar", "TQDMProgressBar", "RichProgressBar", "ProgbarLogger"), _CONSOLE),
    "LearningRateMonitor": "leave it out: lr is in the history and goes to all observers",
    **dict.fromkeys(("Accelerator", "Fabric"), "Trainer(...), or windows(...) and the slots in a loop of your own"),
    **dict.fromkeys(("seed_everything", "set_seed"), "torch.manual_seed(0), and batches(..., shuffle=True, seed=0)"),
    **dict.fromkeys(("TensorBoard", "SummaryWriter"), "from trainwright import TensorBoardLogger"),
    **dict.fromkeys(("ReduceLROnPlateau", "ReduceOnPlateau"), "from trainwright import Plateau"),
    **dict.fromkeys(("OneCycleLR",), "from trainwright import OneCycle"),
    **dict.fromkeys(("CosineAnnealingLR", "CosineSchedule"), "from trainwright import Cosine"),
    **dict.fromkeys(("LRFinder", "LearningRateFinder", "lr_find"), "from trainwright import find_lr"),
    **dict.fromkeys(("ModelSummary", "ModelEMA"), "from trainwright import summary, EMA"),
    **dict.fromkeys(("GradientClipping", "GradClip"), "from trainwright import ClipNorm"),
    **dict.fromkeys(("DDPStrategy", "DistributedDataParallel"), "from trainwright import DDP"),
    **dict.fromkeys(("FSDPStrategy", "FullyShardedDataParallel"), "from trainwright import FSDP"),
    **dict.fromkeys(("Accuracy", "accuracy_score"), "from trainwright import accuracy"),
}
"""Names of other libraries that users import from this one, with the code to write here."""

_VAL, _OBSERVERS = "fit(train, val, ...)", "Trainer(..., observers=[Journal(...)])"
_TORCHRUN = "torchrun --nproc-per-node <2> train.py"
_DEVICES = f'Trainer(..., parallel="auto")   # under {_TORCHRUN}, or launch(main, processes=<2>)'
_SEED = "fit(batches(data, 64, shuffle=True, seed=<0>), ...)   # and torch.manual_seed(<0>) before the model is made"
_LIMIT = "fit(..., max_updates=<10>)   # smoke_run(trainer, train, val) is a dry run of all slots"
_SPLIT = "train, val = trainwright.data.random_split(data, <0.2>)"
_BEST, _RESTORED = 'Checkpoint(..., best=<"val_loss">)', 'Checkpoint(..., best="val_loss", restore_best=True)'
_ARGS = 'Trainer(..., precision="bf16", accumulate=4)   # and fit(..., epochs=3, batch_size=32): each by its name'
FOREIGN_ARGUMENTS = {
    "callbacks": "observers=[...], early_stopping=EarlyStopping(...), checkpoint=Checkpoint(...)",
    "args": _ARGS,
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "nb_epoch"), "fit(..., epochs=<10>)"),
    **dict.fromkeys(("max_steps", "num_steps"), "fit(..., max_updates=<1000>)"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "grad_clip", "clip_grad_norm"), "Trainer(..., clip=<1.0>)"),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum_steps"), "Trainer(..., accumulate=<4>)"
    ),
    "shuffle": "fit(batches(data, 64, shuffle=True), ...)",
    **dict.fromkeys(("lr", "learning_rate"), "Trainer(model, torch.optim.AdamW(parameters, lr=<1e-3>))"),
    "weight_decay": "Trainer(model, torch.optim.AdamW(parameters, lr=1e-3, weight_decay=<0.01>))",
    **dict.fromkeys(("optim", "optimizers"), "Trainer(model, optimizer, loss)"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "compute_loss_func"), "Trainer(model, optimizer, loss)"),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "train_loader", "train_dataset"), "fit(train, ...)"),
    **dict.fromkeys(
        ("val_dataloader", "val_dataloaders", "val_loader", "validation_data", "valid_data", "eval_dataset"), _VAL
    ),
    **dict.fromkeys(("verbose", "enable_progress_bar", "progress_bar"), "Trainer(..., console=False)"),
    **dict.fromkeys(("logger", "report_to", "log_every_n_steps", "logging_steps"), _OBSERVERS),
    "profiler": "Trainer(..., observers=[Profile(...)])",
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), _SCHEDULE),
    "warmup_steps": "Trainer(..., schedule=Cosine(warmup=Updates(<500>)))",
    "warmup_ratio": "Trainer(..., schedule=Cosine(warmup=<0.1>))",
    "compute_metrics": 'Trainer(..., metrics={"accuracy": accuracy})',
    **dict.fromkeys(("devices", "gpus", "num_devices", "nproc", "num_processes"), _DEVICES),
    **dict.fromkeys(("strategy", "num_nodes"), _DEVICES.replace("<2>", "2")),
    "sync_batchnorm": "Trainer(..., parallel=DDP(sync_batchnorm=True))",
    **dict.fromkeys(("compile", "torch_compile"), 'Trainer(..., fast=Fast(compile="regional"))'),
    **dict.fromkeys(("seed", "random_state", "manual_seed"), _SEED),
    **dict.fromkeys(("limit", "limit_train_batches", "fast_dev_run", "overfit_batches"), _LIMIT),
    **dict.fromkeys(
        ("limit_val_batches", "validation_steps", "val_batches", "eval_subset_num_batches"),
        "fit(..., max_val_batches=<20>)   # smoke_run(trainer, train, val) is a dry run of all slots",
    ),
    **dict.fromkeys(("eval_on_start", "val_before_train"), "fit(..., validate_at_start=True)"),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), "evaluate(data, max_batches=<20>)"),
    **dict.fromkeys(("steps_per_epoch", "train_steps"), "fit(..., epoch_updates=<100>)"),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size", "bs"), "fit(..., batch_size=<64>)"),
    **dict.fromkeys(("val_check_interval", "eval_steps"), "fit(..., validate=Updates(<500>))"),
    "check_val_every_n_epoch": "fit(..., validate=Epochs(<1>))",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "fit(..., validate=Epochs(1))   # or Updates(500)"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "fit(batches(data, 64, workers=<4>), ...)"),
    **dict.fromkeys(("data_collator", "collate_fn"), "fit(batches(data, 64, collate=...), ...)"),
    "patience": "Trainer(..., early_stopping=EarlyStopping(..., patience=<5>))",
    "ema": "Trainer(..., average=EMA(<0.999>))",
    **dict.fromkeys(("validation_split", "val_split"), "fit(train, val, ...)   # " + _SPLIT),
    "datamodule": _VAL,
    **{name: f'Trainer(..., precision="{name}")' for name in ("bf16", "fp16", "tf32")},
    **dict.fromkeys(("amp", "mixed_precision"), 'Trainer(..., precision="bf16")   # or "fp16", or "auto"'),
    "accelerator": 'Trainer(..., device="auto")   # or device="cpu", "cuda" or "mps"',
    **dict.fromkeys(("use_cpu", "no_cuda"), 'Trainer(..., device="cpu")'),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), 'fit(..., resume="auto")'),
    **dict.fromkeys(("dirpath", "output_dir", "save_dir", "default_root_dir"), 'Checkpoint(<"runs/1">, ...)'),
    **dict.fromkeys(("monitor", "metric_for_best_model", "save_best_only"), _BEST),
    **dict.fromkeys(("load_best_model_at_end", "restore_best_weights"), _RESTORED),
    "save_top_k": 'Checkpoint(..., best="val_loss", top=<3>)',
    **dict.fromkeys(("save_last", "save_total_limit", "max_to_keep"), "Checkpoint(..., keep=<3>)"),
    **dict.fromkeys(("every_n_train_steps", "save_steps"), "Checkpoint(..., every=Updates(<500>))"),
    "every_n_epochs": "Checkpoint(..., every=Epochs(<1>))",
    "save_strategy": "Checkpoint(..., every=Epochs(1))   # or Updates(500)",
}
"""Arguments of other libraries, with the code to write here instead; for all functions.

The user's value replaces an example in angle brackets (`with_value`).
"""

_WEIGHTS = 'load_weights("runs/1", trainer.model) before it'
_OVER_ALL = "leave it out: a schedule gets the length of the run from fit"
_FROM_FIT = "leave it out: the Trainer gives its optimizer"
_SEEN = "leave it out: the console and all observers get each logged number"
_MEAN = "leave it out: observers get the number of each update, and the history its mean over the epoch"
_INIT = "WandbLogger(run=wandb.init(project=..., ...))   # with any argument of wandb"
_LOGGERS = {
    **dict.fromkeys(("config", "hparams", "params"), "hyperparameters={...}"),
    **dict.fromkeys(("log_dir", "logdir", "save_dir", "dir"), 'directory=<"runs/1">'),
    "run_name": 'name=<"first">',
}
_PASSES = {"ckpt_path": _WEIGHTS, "weights": _WEIGHTS, "dataloaders": "the data as the first argument"}
_SCHEDULES = {
    "last_epoch": 'fit(..., resume="auto")',
    "optimizer": _FROM_FIT,
    **dict.fromkeys(("total_steps", "total_iters", "num_training_steps", "T_max"), _OVER_ALL),
    **dict.fromkeys(("epochs", "steps_per_epoch"), _OVER_ALL),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "warmup=Updates(<500>), or Epochs(1)"),
    "warmup_epochs": "warmup=Epochs(<1>), or Updates(500)",
    **dict.fromkeys(("warmup_ratio", "pct_start"), "warmup=<0.3>   # a share of the run"),
    **dict.fromkeys(("eta_min", "min_lr", "end_factor"), "final=0.01   # a share of the rate"),
}
_WORKERS = "batches(data, 64, workers=4)"
_ESTIMATORS = {
    **dict.fromkeys(("max_epochs", "max_iter", "n_epochs", "num_epochs"), "epochs=<50>"),
    **dict.fromkeys(("learning_rate", "learning_rate_init"), "lr=<1e-3>"),
    **dict.fromkeys(("seed", "manual_seed"), "random_state=<0>"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss=nn.CrossEntropyLoss()"),
    **dict.fromkeys(("validation_fraction", "validation_split"), "validation=<0.1>"),
    **dict.fromkeys(("compile", "torch_compile"), 'trainer_params={"fast": Fast(compile="regional")}'),
    "callbacks": 'trainer_params={"observers": [...]}',
}
FOREIGN_ARGUMENTS_OF: dict[str, dict[str, str]] = {
    **dict.fromkeys(("Trainer.predict", "Trainer.evaluate", "Trainer.report"), _PASSES),
    "Trainer.fit": {
        **dict.fromkeys(("x", "y", "X"), "fit((x, y), batch_size=64, ...)"),
        "model": "Trainer(model, ...).fit(train, ...)",
        "class_weight": "Trainer(model, optimizer, nn.CrossEntropyLoss(weight=...))",
        "sample_weight": "batches (x, y, weight) and a training_step that returns MeanLoss(loss, weight.sum())",
    },
    "Trainer.log": {
        **dict.fromkeys(("prog_bar", "logger"), _SEEN),
        **dict.fromkeys(("on_step", "on_epoch"), _MEAN),
        **dict.fromkeys(("sync_dist", "rank_zero_only"), "leave it out: the number is that of all processes"),
        **dict.fromkeys(("batch_size", "n"), "self.log(name, value, count=<32>)"),
    },
    "TensorBoardLogger": _LOGGERS,
    "CSVLogger": _LOGGERS,
    "WandbLogger": _LOGGERS | dict.fromkeys(("entity", "group", "tags", "id", "resume", "mode"), _INIT),
    "MLflowLogger": _LOGGERS | {"experiment_name": 'experiment=<"digits">'},
    "Trainer.save": dict.fromkeys(("path", "filename"), 'trainer.save_weights("model.safetensors")'),
    "batches": {
        "length": "fit(..., epoch_updates=<100>) for epochs of so many batches; bucketed(...) for rows of like length",
        "num_workers": "batches(data, 64, workers=<4>)",
        **dict.fromkeys(("persistent_workers", "worker_init_fn", "pin_memory"), _WORKERS),
        "collate_fn": "batches(data, 64, collate=...)",
        "generator": "batches(data, 64, shuffle=True, seed=0)",
        "prefetch_factor": "batches(data, 64, workers=2)",
        "batch_sampler": "batches(data, 64, sampler=...)",
    },
    "Checkpoint": {
        **dict.fromkeys(("filename", "name"), "Checkpoint(directory, ...)   # each is named by its update"),
        **dict.fromkeys(("path", "folder", "save_path"), 'Checkpoint(<"runs/1">, ...)'),
        "n_saved": "Checkpoint(..., keep=<3>)",
        "save_weights_only": 'trainer.save_weights("model.safetensors")   # a checkpoint has all that a resume needs',
        **dict.fromkeys(("period", "save_freq"), "Checkpoint(..., every=Epochs(1))"),
    },
    "EarlyStopping": {
        **dict.fromkeys(("metric", "metric_name"), 'EarlyStopping(<"val_loss">)'),
        "score_function": 'EarlyStopping("val_loss")',
        **dict.fromkeys(("restore_best_weights", "restore_best_model"), "EarlyStopping(..., restore_best=True)"),
        **dict.fromkeys(("delta", "threshold", "tol"), "EarlyStopping(..., min_delta=<0.01>)"),
    },
    "StepLR": {"step_size": "StepLR(Epochs(<1>), gamma=0.1)   # or StepLR(Updates(1000))", **_SCHEDULES},
    "Linear": {
        **_SCHEDULES,
        "start_factor": "Linear(start=<0.1>, ...)",
        "end_factor": "Linear(final=<0.0>)",
        "total_iters": "Linear(over=Epochs(<5>))",
    },
    "Cosine": _SCHEDULES | dict.fromkeys(("T_0", "T_mult"), "TorchSchedule(lambda optimizer: ...)"),
    "Plateau": {"optimizer": _FROM_FIT, "last_epoch": 'fit(..., resume="auto")'},
    "OneCycle": _SCHEDULES | {"lr": "OneCycle(max_lr=<1e-2>)"},
    **dict.fromkeys(("MultiStep", "Exponential", "Cyclic", "WarmupStableDecay"), _SCHEDULES),
    **dict.fromkeys(("SklearnClassifier", "SklearnRegressor"), _ESTIMATORS),
    "EMA": dict.fromkeys(("beta", "momentum", "alpha"), "EMA(decay=<0.999>)"),
    "SWA": dict.fromkeys(("swa_start", "start_epoch"), "SWA(start=0.75)"),
    "MixedPrecision": dict.fromkeys(("dtype", "precision"), 'MixedPrecision("fp16")'),
    "FSDP": {
        **dict.fromkeys(("auto_wrap_policy", "transformer_layer_cls_to_wrap"), "FSDP(blocks={Block})"),
        "sharding_strategy": "FSDP(..., reshard_after_forward=True)",
        "mixed_precision": "FSDP(..., policy=MixedPrecisionPolicy(...))",
    },
}
"""Arguments of other libraries, by the function of this library that they are given to."""

OWN_ARGUMENTS = {
    "epochs": "fit(..., epochs=<10>)",
    "max_updates": "fit(..., max_updates=<1000>)",
    "max_seconds": "fit(..., max_seconds=<3600>)",
    "epoch_updates": "fit(..., epoch_updates=<100>)",
    "batch_size": "fit(..., batch_size=<64>)",
    "validate": "fit(..., validate=Epochs(1))",
    "resume": 'fit(..., resume="auto")',
    "optimizer": "Trainer(model, optimizer, loss)",
    "loss": "Trainer(model, optimizer, loss)",
    "metrics": 'Trainer(..., metrics={"accuracy": accuracy})',
    "precision": 'Trainer(..., precision=<"auto">)',
    "accumulate": "Trainer(..., accumulate=<4>)",
    "clip": "Trainer(..., clip=<1.0>)",
    "schedule": _SCHEDULE,
    "early_stopping": 'Trainer(..., early_stopping=EarlyStopping("val_loss"))',
    "checkpoint": 'Trainer(..., checkpoint=Checkpoint("runs/1"))',
    "average": "Trainer(..., average=EMA(0.999))",
    "parallel": 'Trainer(..., parallel="auto")',
    "device": 'Trainer(..., device="auto")',
    "console": "Trainer(..., console=False)",
    "observers": "Trainer(..., observers=[...])",
    "fast": "Trainer(..., fast=Fast())",
}
"""Arguments of this library, with the call that they belong to, for functions without them."""


def check_name(name: str, what: str = "metric") -> None:
    """Raise SettingError for a name that is reserved or starts with `val_`. `what`: the kind of number it names."""
    if not isinstance(name, str) or not name:
        raise SettingError(f"{what} name {name!r}", want="a string that is not empty")
    if name not in RESERVED and not name.startswith("val_"):
        return
    plain = name.removeprefix("val_")
    own = f"my_{plain}" if plain in RESERVED else plain
    fix = f'"{own}"' if name in RESERVED else f'"{own}": validation reports it as {"val_" + own!r}'
    if plain == "loss" and what == "logged":
        fix = "return loss instead of this call: it is reported as loss, and as val_loss in validation"
    why = "is reserved" if name in RESERVED else "starts with val_, which validation puts there itself"
    want = f"a name without val_, other than {', '.join(sorted(RESERVED))}"
    raise SettingError(f"{what} name {name!r} {why}", want=want, fix=fix)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ` Did you mean 'x'?` with the nearest known name; "" if none is near."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the nearest known name; None if none is near."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggests(given: C) -> C:
    """Decorate a function or a class: a call with an unknown argument suggests the right one.

    The TypeError of the call gets a note; one that is raised inside the function is not changed. For a method, an
    object whose class does not call `super().__init__(...)` gives a TypeError that says so.
    """
    if isinstance(given, type):
        cls: Any = given
        cls.__init__ = suggests(cls.__init__)
        if cls.__name__ in FOREIGN_ATTRIBUTES_OF:
            cls.__getattr__ = _refuse_attribute_of(cls.__name__)
        return cast(C, cls)

    @functools.wraps(given)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return given(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            _explain_call(error, given, args=args, named=kwargs)
            raise

    return cast(C, called)


def _explain_call(
    error: Exception, given: Callable[..., Any], *, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    owner = args[0] if args else None
    if isinstance(error, AttributeError):
        if args and error.obj is owner and _is_unmade(owner, error.name):
            raise _unmade(type(owner)) from error
    elif error.__traceback__ is not None and error.__traceback__.tb_next is None:  # no frame of the function
        _suggest(error, given, named, owner=owner)


ATTRIBUTES = frozenset({"fast_path", "history", "result", "world"})
"""Attributes that a Trainer sets: no method of a subclass may have such a name."""


def refuse_near_names(cls: type, known: Collection[str], *, base: type | None = None, prefix: str = "") -> None:
    """Raise TypeError if a method of `cls`, or of a mixin beside `base`, has nearly a `known` name.

    Also for a method with the name of an argument of `base`, which would hide it. With a `prefix`, every method that
    starts with it must be known.
    """
    arguments = set() if base is None else set(inspect.signature(base).parameters)
    inherited = set() if base is None else set(base.__mro__)
    own = [cls] if base is None else [one for one in cls.__mro__ if one not in inherited]
    for name, value in [item for one in own for item in vars(one).items()]:
        if name in known or name.startswith("_") or not callable(value):
            continue
        if not prefix and (instead := _instead_of(name)):
            if not _is_used(name, own):
                raise _foreign(cls, name, known, instead)
            continue
        if not prefix:
            _refuse_attribute(cls, name)
        if base is not None and name in arguments:
            raise TypeError(
                f"{cls.__name__}.{name} is never called: the argument {name}= of {base.__name__} has its name\n"
                f"  want  {base.__name__}(..., {name}=...)\n"
                f"  fix   rename it, and give it as {name}="
            )
        near = get_close_matches(name, sorted(known), n=1, cutoff=0.85)
        if near or (prefix and name.startswith(prefix)):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{cls.__name__}.{name} is not a method that is ever called.{hint}\n"
                f"  want  one of {', '.join(sorted(known))}\n"
                f"  fix   rename it; a helper of your own may start with an underscore"
            )


def refuse_unused_helpers(cls: type, known: Collection[str], *, base: type) -> None:
    """Raise TypeError if `cls` has a method of `FOREIGN_HELPERS` that no other code of the class uses.

    Called when an object is made, not when a class is defined: the use may be in a subclass.
    """
    if cls is base:
        return
    inherited = set(base.__mro__)
    own = [one for one in cls.__mro__ if one not in inherited]
    defined = dict.fromkeys(name for one in own for name, value in vars(one).items() if callable(value))
    for name in defined:
        if name in FOREIGN_HELPERS and not _is_used(name, own):
            raise _foreign(cls, name, known, FOREIGN_HELPERS[name])


def _foreign(cls: type, name: str, known: Collection[str], instead: str) -> TypeError:
    return TypeError(
        f"{cls.__name__}.{name} is a method of other libraries, and is never called here\n"
        f"  want  one of {', '.join(sorted(known))}\n"
        f"  fix   {instead}"
    )


def _refuse_attribute(cls: type, name: str) -> None:
    """Raise TypeError for a method with the name of an attribute of the Trainer."""
    if name in ATTRIBUTES:
        raise TypeError(
            f"{cls.__name__}.{name}: the Trainer has an attribute of this name\n"
            f"  fix   rename it; what belongs in a checkpoint goes into self.state"
        )


def _suggest(error: Exception, function: Callable[..., Any], given: Mapping[str, Any], *, owner: object = None) -> None:
    parameters = [one for name, one in inspect.signature(function).parameters.items() if name != "self"]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    name = function.__qualname__.removesuffix(".__init__")
    if name.startswith("_") and owner is not None:  # a private base: name the class of the object
        name = type(owner).__name__
    known = {one.name for one in parameters}
    unknown = [_unknown(wrong, value, known, name=name) for wrong, value in given.items() if wrong not in known]
    by_name = ", ".join(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
    by_position = ", ".join(one.name for one in parameters if one.kind is not one.KEYWORD_ONLY)
    if not unknown:
        takes = "" if parameters else f", which are none.{_meant('path', None, (), name=name)}"
        unknown = [f"{name} was called with other arguments than it takes{takes}"]
    lines = [NOTE + f"\n{' ' * len(NOTE)}".join(unknown)]
    entries = {"by position": by_position, "by name": by_name, "where": user_line()}
    error.add_note("\n".join([*lines, *(f"  {label:<13}{text}" for label, text in entries.items() if text)]))


def _unknown(wrong: str, value: Any, known: Collection[str], *, name: str) -> str:
    meant = _meant(wrong, value, known, name=name)
    return f"{name} takes no {wrong!r}" + (f".{meant}" if meant else "")


def _meant(wrong: str, value: Any, known: Collection[str], *, name: str) -> str:
    instead = FOREIGN_ARGUMENTS_OF.get(name, {}).get(wrong) or FOREIGN_ARGUMENTS.get(wrong)
    near = did_you_mean(wrong, known)
    instead = with_value(instead or ("" if near else OWN_ARGUMENTS.get(wrong, "")), value)
    if instead.startswith("leave"):
        return f" L{instead[1:]}"
    return f" Write {instead}" if instead else near


def with_value(instead: str, value: Any = None) -> str:
    """Return a line of code with the user's value in place of each example such as `<10>` of the same kind."""
    return re.sub(r"<([^<>]+)>", lambda example: _of_this_kind(value, example[1]), instead)


def _of_this_kind(value: Any, example: str) -> str:
    """Return a value as code; the example if the value is of another kind: a bool, -1, or a fraction for a count."""
    if example.startswith('"'):
        return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else example
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return example
    if set("e.") & set(example):
        return f"{value}"
    return f"{int(value)}" if float(value).is_integer() else example


def _refuse_attribute_of(cls: str) -> Callable[[object, str], Any]:
    """Return a `__getattr__` that raises AttributeError, with the name here for `FOREIGN_ATTRIBUTES_OF`."""

    def get(given: object, name: str) -> Any:
        text, instead = (
            f"{type(given).__name__!r} object has no attribute {name!r}",
            FOREIGN_ATTRIBUTES_OF[cls].get(name),
        )
        raise AttributeError(message(text, fix=instead) if instead else text, name=name, obj=given)

    return get


class _Elsewhere:
    """Descriptor for an attribute of other libraries: a read raises AttributeError with the name here.

    It has no `__set__`, so that an attribute or method of the user overrides it. A `__getattr__` would slow down all
    attributes of the class: Python 3.11 calls methods of such a class five times slower.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, given: object, cls: type) -> Any:
        raise AttributeError(message(f"{cls.__name__!r} object has no attribute {self._name!r}", fix=self._instead))


def point_elsewhere(cls: type) -> None:
    """Add `FOREIGN_ATTRIBUTES` to a class, unless it has them: reads raise AttributeError with the name here."""
    for name, instead in FOREIGN_ATTRIBUTES.items():
        if name not in vars(cls):
            setattr(cls, name, _Elsewhere(name, instead))


def points_elsewhere(given: object, name: str) -> bool:
    """Return whether an attribute is one that `point_elsewhere` has added."""
    return isinstance(inspect.getattr_static(given, name, None), _Elsewhere)


def _is_used(name: str, classes: Collection[type]) -> bool:
    """Return whether other code of the classes uses a method, by its name or by an alias of its function."""
    itself = [vars(one)[name] for one in classes if name in vars(one)]
    others = [value for one in classes for key, value in vars(one).items() if key != name and _may_use(key, value)]
    return any(found == name or found in itself for found in _reached(others))


def _may_use(key: str, value: Any) -> bool:
    return callable(value) or not key.startswith("__")  # not a docstring, the module's name or annotations


def _reached(values: Collection[Any]) -> Iterator[Any]:
    """Yield the names, strings and functions in the code of methods, properties, decorators and inner functions."""
    waiting, seen = list(values), set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, CodeType):
            waiting += [*one.co_names, *one.co_consts]
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, tuple | list | set | frozenset):
            waiting += one
        elif isinstance(one, str) or inspect.isfunction(one):
            yield one
        if not isinstance(one, type):
            waiting += [found for part in _PARTS if (found := getattr(one, part, None)) is not None]
        for cell in getattr(one, "__closure__", None) or ():  # holds the function that a decorator has wrapped
            with suppress(ValueError):  # an empty cell: the variable is not set yet
                waiting += [cell.cell_contents] if inspect.isroutine(cell.cell_contents) else []


_PARTS = ("__code__", "__func__", "__wrapped__", "fget", "fset", "func")
"""Attributes of functions, methods, properties and partials that lead to their code."""


def _instead_of(name: str) -> str:
    """Return the code to write instead of a method that another library calls; "" for any other name."""
    if name in FOREIGN_METHODS or not name.startswith("on_"):
        return FOREIGN_METHODS.get(name, "")
    if "epoch" in name:
        return _BEGIN if name.endswith(("start", "begin")) else _END
    if name.endswith("end") and ("batch" in name or "step" in name):
        return _AFTER
    return f"{_BEGIN} or end_epoch(self, metrics), after_update(self); on_... are methods of an Observer"


def _is_unmade(made: Any, name: str | None) -> bool:
    """Return whether an object lacks an attribute because its class does not call the `__init__` of its base."""
    for cls in type(made).__mro__[1:]:
        base = getattr(vars(cls).get("__init__"), "__wrapped__", None)
        if base is not None:
            return name in base.__code__.co_names and type(made) is not cls
    return False


def _unmade(cls: type) -> TypeError:
    fix = "super().__init__(model, optimizer, ...) in it"
    return TypeError(message(f"{cls.__name__}.__init__ does not call the one of its base", fix=fix))
