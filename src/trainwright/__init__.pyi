from trainwright import data as data
from trainwright import metrics as metrics
from trainwright import modules as modules
from trainwright import observers as observers
from trainwright import optim as optim
from trainwright import precision as precision
from trainwright import protocols as protocols
from trainwright import schedules as schedules
from trainwright import testing as testing
from trainwright import tools as tools
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
from trainwright.core.plan import Plan
from trainwright.core.progress import Progress
from trainwright.core.records import MeanLoss, Result, StepOutput, SumLoss
from trainwright.data.opening import batches
from trainwright.distributed.ddp import DDP
from trainwright.distributed.fsdp import FSDP
from trainwright.distributed.launch import launch
from trainwright.evaluation.reports import Report
from trainwright.fit.early_stopping import EarlyStopping
from trainwright.metrics.metrics import accuracy, over_all, top_k
from trainwright.modules.freezing import freeze, unfreeze
from trainwright.observers.console import Console
from trainwright.observers.journal import Journal
from trainwright.observers.loggers.tensorboard import TensorBoardLogger
from trainwright.observers.probes import Probe
from trainwright.optim.averaging import EMA, SWA
from trainwright.optim.clip import ClipNorm, ClipValue
from trainwright.optim.optimizers import adamw, sgd
from trainwright.precision.mixed_precision import MixedPrecision
from trainwright.protocols import Observer
from trainwright.schedules.standard import Cosine, OneCycle, StepLR
from trainwright.schedules.stepped import Plateau, TorchSchedule
from trainwright.tools.advising import advise
from trainwright.tools.batch_search import find_batch_size
from trainwright.tools.lr_search import find_lr
from trainwright.tools.model_summary import summary
from trainwright.trainer import Trainer
from trainwright.update.window import Window, windows

__version__: str

__all__ = [
    "DDP",
    "EMA",
    "FSDP",
    "SWA",
    "Checkpoint",
    "CheckpointError",
    "ClipNorm",
    "ClipValue",
    "Console",
    "Cosine",
    "DataError",
    "DistributedError",
    "EarlyStopping",
    "Epochs",
    "Fast",
    "Journal",
    "MeanLoss",
    "MixedPrecision",
    "NonFiniteError",
    "Observer",
    "OneCycle",
    "Plan",
    "Plateau",
    "Probe",
    "Progress",
    "Report",
    "Result",
    "Seconds",
    "SettingError",
    "StepError",
    "StepLR",
    "StepOutput",
    "Stopped",
    "SumLoss",
    "TensorBoardLogger",
    "TorchSchedule",
    "Trainer",
    "TrainwrightError",
    "Updates",
    "Window",
    "__version__",
    "accuracy",
    "adamw",
    "advise",
    "batches",
    "find_batch_size",
    "find_lr",
    "freeze",
    "latest_checkpoint",
    "launch",
    "load_weights",
    "over_all",
    "save_weights",
    "sgd",
    "summary",
    "top_k",
    "unfreeze",
    "windows",
]
