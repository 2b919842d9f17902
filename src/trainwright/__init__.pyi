from trainwright.acceleration.fast import Fast
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import latest_checkpoint, load_weights
from trainwright.checkpointing.weights import save_weights
from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import (
    CheckpointError,
    DataError,
    DistributedError,
    NonFiniteError,
    SettingError,
    StepError,
    Stopped,
    TrainwrightError,
)
from trainwright.core.model_statistics import ModelStatistics, ParameterStatistics
from trainwright.core.plan import Plan
from trainwright.core.progress import Progress
from trainwright.core.records import Best, MeanLoss, Result, Saved, StepOutput, SumLoss, Update, Validation
from trainwright.core.speed import Speed
from trainwright.data.batches import batches
from trainwright.data.row_batches import Batches
from trainwright.data.sharding import shard, sharded
from trainwright.data.transforms.augment import Augment, Draws, Normalize
from trainwright.data.transforms.bucketing import Bucketed, bucketed
from trainwright.data.transforms.padding import Nest, Pack, Pad, nest, pack, pad
from trainwright.data.transforms.prefetching import prefetch
from trainwright.data.transforms.zipped import Together, together
from trainwright.distributed.ddp import DDP
from trainwright.distributed.fsdp import FSDP
from trainwright.distributed.launch import launch
from trainwright.distributed.mesh import Slice
from trainwright.evaluation.reports import Report
from trainwright.fit.early_stopping import EarlyStopping
from trainwright.metrics.metrics import Derived, accuracy, over_all, top_k
from trainwright.metrics.scores import F1, MAE, R2, RMSE
from trainwright.modules.activations import checkpoint_activations
from trainwright.modules.flops import count_flops
from trainwright.modules.freezing import freeze, unfreeze
from trainwright.observers.console import Console
from trainwright.observers.journal import Journal, journal_to_csv, read_journal
from trainwright.observers.loggers.tensorboard import TensorBoardLogger
from trainwright.observers.probes import Probe
from trainwright.observers.profiler import Profile
from trainwright.observers.statistics import Statistics
from trainwright.observers.throughput import Throughput
from trainwright.optim.averaging import EMA, SWA, AveragedWeights, WeightAveraging
from trainwright.optim.clip import ClipNorm, ClipValue
from trainwright.optim.gradients import Gradients
from trainwright.optim.groups import param_groups
from trainwright.optim.layerwise import Lamb, Lars
from trainwright.optim.optimizers import adamw, muon, sgd
from trainwright.precision.base import LossScale, Precision
from trainwright.precision.mixed_precision import LossScaler, MixedPrecision
from trainwright.protocols import Clip, Metric, Observer, Schedule, Stateful
from trainwright.schedules.cycles import Cyclic, OneCycle
from trainwright.schedules.standard import Cosine, Exponential, Linear, MultiStep, StepLR, WarmupStableDecay
from trainwright.schedules.stepped import Plateau, TorchSchedule
from trainwright.tools.advice import Advice, Effect
from trainwright.tools.advising import advise
from trainwright.tools.batch_search import LargestBatch, find_batch_size, linear_scaled, sqrt_scaled
from trainwright.tools.cross_validate import CrossValidation, Fold, cross_validate
from trainwright.tools.debug import anomaly, deterministic
from trainwright.tools.lr_search import LRRange, find_lr
from trainwright.tools.sanity import Overfit, SmokeRun, overfit_batches, smoke_run
from trainwright.tools.sklearn_wrapper import SklearnClassifier, SklearnRegressor
from trainwright.tools.summary import summary
from trainwright.trainer import Trainer
from trainwright.update.window import Window, windows

__version__: str

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
    "AveragedWeights",
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
    "DistributedError",
    "Draws",
    "EarlyStopping",
    "Effect",
    "Epochs",
    "Exponential",
    "Fast",
    "Fold",
    "Gradients",
    "Journal",
    "LRRange",
    "Lamb",
    "LargestBatch",
    "Lars",
    "Linear",
    "LossScale",
    "LossScaler",
    "MeanLoss",
    "Metric",
    "MixedPrecision",
    "ModelStatistics",
    "MultiStep",
    "Nest",
    "NonFiniteError",
    "Normalize",
    "Observer",
    "OneCycle",
    "Overfit",
    "Pack",
    "Pad",
    "ParameterStatistics",
    "Plan",
    "Plateau",
    "Precision",
    "Probe",
    "Profile",
    "Progress",
    "Report",
    "Result",
    "Saved",
    "Schedule",
    "Seconds",
    "SettingError",
    "SklearnClassifier",
    "SklearnRegressor",
    "Slice",
    "SmokeRun",
    "Speed",
    "Stateful",
    "Statistics",
    "StepError",
    "StepLR",
    "StepOutput",
    "Stopped",
    "SumLoss",
    "TensorBoardLogger",
    "Throughput",
    "Together",
    "TorchSchedule",
    "Trainer",
    "TrainwrightError",
    "Update",
    "Updates",
    "Validation",
    "WarmupStableDecay",
    "WeightAveraging",
    "Window",
    "__version__",
    "accuracy",
    "adamw",
    "advise",
    "anomaly",
    "batches",
    "bucketed",
    "checkpoint_activations",
    "count_flops",
    "cross_validate",
    "deterministic",
    "find_batch_size",
    "find_lr",
    "freeze",
    "journal_to_csv",
    "latest_checkpoint",
    "launch",
    "linear_scaled",
    "load_weights",
    "muon",
    "nest",
    "over_all",
    "overfit_batches",
    "pack",
    "pad",
    "param_groups",
    "prefetch",
    "read_journal",
    "save_weights",
    "sgd",
    "shard",
    "sharded",
    "smoke_run",
    "sqrt_scaled",
    "summary",
    "together",
    "top_k",
    "unfreeze",
    "windows",
]
