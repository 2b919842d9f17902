from trainwright.core.records import Best, Saved, Update, Validation
from trainwright.observers.console import Console
from trainwright.observers.journal import Journal, journal_to_csv, read_journal
from trainwright.observers.loggers.base import Logger
from trainwright.observers.loggers.csv_file import CSVLogger
from trainwright.observers.loggers.mlflow_tracking import MLflowLogger
from trainwright.observers.loggers.tensorboard import TensorBoardLogger
from trainwright.observers.loggers.weights_and_biases import WandbLogger
from trainwright.observers.probes import ModelStatistics, ParameterStatistics, Probe, Statistics
from trainwright.observers.profiler import Profile
from trainwright.observers.throughput import Speed, Throughput

__all__ = [
    "Best",
    "CSVLogger",
    "Console",
    "Journal",
    "Logger",
    "MLflowLogger",
    "ModelStatistics",
    "ParameterStatistics",
    "Probe",
    "Profile",
    "Saved",
    "Speed",
    "Statistics",
    "TensorBoardLogger",
    "Throughput",
    "Update",
    "Validation",
    "WandbLogger",
    "journal_to_csv",
    "read_journal",
]
