"""The PyTorch training loop, exact, fast and readable: one Trainer, named slots, hooks, observers."""

from importlib import import_module as _module
from typing import TYPE_CHECKING

from trainwright.base.contracts import Clip, Metric, Observer, Part, Precision, Rates, Scaler, Schedule, Source
from trainwright.base.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    ProcessError,
    SettingError,
    StepError,
    Stopped,
    TrainwrightError,
)
from trainwright.base.plan import Plan
from trainwright.base.progress import Progress
from trainwright.base.records import Best, Mean, Result, Saved, Step, Sum, Update, Validation
from trainwright.base.spans import Epochs, Seconds, Updates
from trainwright.data.own import Batches, batches
from trainwright.observers.console import Console
from trainwright.parallel.ddp import DDP
from trainwright.runtime.freezing import freeze, unfreeze
from trainwright.runtime.gradients import Gradients
from trainwright.runtime.modules import mode
from trainwright.slots.clip import ClipNorm, ClipValue
from trainwright.slots.metrics import Derived, accuracy, top_k
from trainwright.slots.precision import LossScaler, MixedPrecision
from trainwright.slots.window import Window, windows
from trainwright.trainer import Trainer

if TYPE_CHECKING:
    from trainwright.base.dealing import Slice
    from trainwright.base.model_statistics import ModelStatistics, ParameterStatistics
    from trainwright.base.speed import Speed
    from trainwright.data.augment import Augment, Draws, Normalise
    from trainwright.data.bucketed import Bucketed, bucketed
    from trainwright.data.padding import Nest, Pack, Pad, nest, pack, pad
    from trainwright.data.prefetch import prefetch
    from trainwright.data.sharded import shard, sharded
    from trainwright.data.together import Together, together
    from trainwright.observers.journal import Journal, journal_to_csv, read_journal
    from trainwright.observers.probe import Probe
    from trainwright.observers.profile import Profile
    from trainwright.observers.pruning import Pruning
    from trainwright.observers.statistics import Statistics
    from trainwright.observers.tensorboard import TensorBoard
    from trainwright.observers.throughput import Throughput
    from trainwright.parallel.fsdp import FSDP
    from trainwright.parallel.launch import launch
    from trainwright.run.report import Report
    from trainwright.runtime.activations import checkpoint_activations
    from trainwright.runtime.flops import count_flops
    from trainwright.slots.average import EMA, SWA, Average, Averaging
    from trainwright.slots.checkpoint import Checkpoint, Keeping, Saving
    from trainwright.slots.early_stopping import EarlyStopping, Stopping, Watching
    from trainwright.slots.fast import Fast
    from trainwright.slots.groups import param_groups
    from trainwright.slots.lamb import Lamb
    from trainwright.slots.lars import Lars
    from trainwright.slots.optimizers import adamw, muon, sgd
    from trainwright.slots.saved import latest_checkpoint, load_weights, save_weights
    from trainwright.slots.schedule import (
        Cosine,
        Cyclic,
        Exponential,
        Linear,
        MultiStep,
        OneCycle,
        Plateau,
        StepLR,
        TorchSchedule,
        WarmupStableDecay,
    )
    from trainwright.slots.scores import F1, MAE, R2, RMSE
    from trainwright.tools.advice import Advice, Effect
    from trainwright.tools.advise import advise
    from trainwright.tools.cross_validate import cross_validate
    from trainwright.tools.debug import anomaly, deterministic
    from trainwright.tools.fast_run import FastRun, fast_run
    from trainwright.tools.folds import CrossValidation, Fold
    from trainwright.tools.largest_batch import LargestBatch, largest_batch
    from trainwright.tools.lr_range import LRRange, lr_range
    from trainwright.tools.masking import mask_weights
    from trainwright.tools.overfit import Overfit, overfit_batches
    from trainwright.tools.pruning import remove_channels, shrink
    from trainwright.tools.scaling import linear_scaled, sqrt_scaled
    from trainwright.tools.sklearn_wrapper import SklearnClassifier, SklearnRegressor
    from trainwright.tools.summary import summary
    from trainwright.tools.tried import Tried, Tuned
    from trainwright.tools.tune import constrain, tune
else:
    _LATER = {
        "base.dealing": ("Slice",),
        "base.model_statistics": ("ModelStatistics", "ParameterStatistics"),
        "base.speed": ("Speed",),
        "data.augment": ("Augment", "Draws", "Normalise"),
        "data.bucketed": ("Bucketed", "bucketed"),
        "data.padding": ("Nest", "Pack", "Pad", "nest", "pack", "pad"),
        "data.prefetch": ("prefetch",),
        "data.sharded": ("shard", "sharded"),
        "data.together": ("Together", "together"),
        "observers.journal": ("Journal", "journal_to_csv", "read_journal"),
        "observers.probe": ("Probe",),
        "observers.profile": ("Profile",),
        "observers.pruning": ("Pruning",),
        "observers.statistics": ("Statistics",),
        "observers.tensorboard": ("TensorBoard",),
        "observers.throughput": ("Throughput",),
        "parallel.fsdp": ("FSDP",),
        "parallel.launch": ("launch",),
        "run.report": ("Report",),
        "runtime.activations": ("checkpoint_activations",),
        "runtime.flops": ("count_flops",),
        "slots.average": ("EMA", "SWA", "Average", "Averaging"),
        "slots.checkpoint": ("Checkpoint", "Keeping", "Saving"),
        "slots.early_stopping": ("EarlyStopping", "Stopping", "Watching"),
        "slots.fast": ("Fast",),
        "slots.groups": ("param_groups",),
        "slots.lamb": ("Lamb",),
        "slots.lars": ("Lars",),
        "slots.optimizers": ("adamw", "muon", "sgd"),
        "slots.saved": ("latest_checkpoint", "load_weights", "save_weights"),
        "slots.schedule": (
            *("Cosine", "Cyclic", "Exponential", "Linear", "MultiStep", "OneCycle", "Plateau", "StepLR"),
            *("TorchSchedule", "WarmupStableDecay"),
        ),
        "slots.scores": ("F1", "MAE", "R2", "RMSE"),
        "tools.advice": ("Advice", "Effect"),
        "tools.advise": ("advise",),
        "tools.cross_validate": ("cross_validate",),
        "tools.debug": ("anomaly", "deterministic"),
        "tools.fast_run": ("FastRun", "fast_run"),
        "tools.folds": ("CrossValidation", "Fold"),
        "tools.largest_batch": ("LargestBatch", "largest_batch"),
        "tools.lr_range": ("LRRange", "lr_range"),
        "tools.masking": ("mask_weights",),
        "tools.overfit": ("Overfit", "overfit_batches"),
        "tools.pruning": ("remove_channels", "shrink"),
        "tools.scaling": ("linear_scaled", "sqrt_scaled"),
        "tools.sklearn_wrapper": ("SklearnClassifier", "SklearnRegressor"),
        "tools.summary": ("summary",),
        "tools.tried": ("Tried", "Tuned"),
        "tools.tune": ("constrain", "tune"),
    }
    """The names of what a run may well do without, by their modules: imported when they are first asked for."""

    def __getattr__(name):
        for module, names in _LATER.items():
            if name in names:
                value = globals()[name] = getattr(_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_module(__name__))

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "DDP",
    "EMA",
    "F1",
    "FSDP",
    "MAE",
    "R2",
    "RMSE",
    "SWA",
    "Advice",
    "Augment",
    "Average",
    "Averaging",
    "Batches",
    "Best",
    "Bucketed",
    "Checkpoint",
    "CheckpointError",
    "Clip",
    "ClipNorm",
    "ClipValue",
    "Console",
    "Cosine",
    "CrossValidation",
    "Cyclic",
    "DataError",
    "Derived",
    "Draws",
    "EarlyStopping",
    "Effect",
    "Epochs",
    "Exponential",
    "Fast",
    "FastRun",
    "Fold",
    "Gradients",
    "Journal",
    "Keeping",
    "LRRange",
    "Lamb",
    "LargestBatch",
    "Lars",
    "Linear",
    "LossScaler",
    "Mean",
    "Metric",
    "MixedPrecision",
    "ModelStatistics",
    "MultiStep",
    "Nest",
    "NonFiniteError",
    "Normalise",
    "Observer",
    "OneCycle",
    "Overfit",
    "Pack",
    "Pad",
    "ParameterStatistics",
    "Part",
    "Plan",
    "Plateau",
    "Precision",
    "Probe",
    "ProcessError",
    "Profile",
    "Progress",
    "Pruning",
    "Rates",
    "Report",
    "Result",
    "Saved",
    "Saving",
    "Scaler",
    "Schedule",
    "Seconds",
    "SettingError",
    "SklearnClassifier",
    "SklearnRegressor",
    "Slice",
    "Source",
    "Speed",
    "Statistics",
    "Step",
    "StepError",
    "StepLR",
    "Stopped",
    "Stopping",
    "Sum",
    "TensorBoard",
    "Throughput",
    "Together",
    "TorchSchedule",
    "Trainer",
    "TrainwrightError",
    "Tried",
    "Tuned",
    "Update",
    "Updates",
    "Validation",
    "WarmupStableDecay",
    "Watching",
    "Window",
    "__version__",
    "accuracy",
    "adamw",
    "advise",
    "anomaly",
    "batches",
    "bucketed",
    "checkpoint_activations",
    "constrain",
    "count_flops",
    "cross_validate",
    "deterministic",
    "fast_run",
    "freeze",
    "journal_to_csv",
    "largest_batch",
    "latest_checkpoint",
    "launch",
    "linear_scaled",
    "load_weights",
    "lr_range",
    "mask_weights",
    "mode",
    "muon",
    "nest",
    "overfit_batches",
    "pack",
    "pad",
    "param_groups",
    "prefetch",
    "read_journal",
    "remove_channels",
    "save_weights",
    "sgd",
    "shard",
    "sharded",
    "shrink",
    "sqrt_scaled",
    "summary",
    "together",
    "top_k",
    "tune",
    "unfreeze",
    "windows",
]
__version__ = "0.1.0"
