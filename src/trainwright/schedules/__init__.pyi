from trainwright.schedules.bound import BoundSchedule
from trainwright.schedules.cycles import Cyclic, OneCycle
from trainwright.schedules.standard import Cosine, Exponential, Linear, MultiStep, StepLR, WarmupStableDecay
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
