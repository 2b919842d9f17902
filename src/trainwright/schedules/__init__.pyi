from trainwright.schedules.bound import BoundSchedule
from trainwright.schedules.standard import (
    Cosine,
    Cyclic,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    StepLR,
    WarmupStableDecay,
)
from trainwright.schedules.stepped import Plateau, TorchSchedule

__all__ = [
    "BoundSchedule",
    "Cosine",
    "Cyclic",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Plateau",
    "StepLR",
    "TorchSchedule",
    "WarmupStableDecay",
]
