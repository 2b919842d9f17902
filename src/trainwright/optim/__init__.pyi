from trainwright.optim.averaging import EMA, SWA, AveragedWeights, WeightAveraging
from trainwright.optim.clip import ClipNorm, ClipValue
from trainwright.optim.gradients import Gradients
from trainwright.optim.layerwise import Lamb, Lars
from trainwright.optim.optimizers import adamw, muon, param_groups, sgd

__all__ = [
    "EMA",
    "SWA",
    "AveragedWeights",
    "ClipNorm",
    "ClipValue",
    "Gradients",
    "Lamb",
    "Lars",
    "WeightAveraging",
    "adamw",
    "muon",
    "param_groups",
    "sgd",
]
