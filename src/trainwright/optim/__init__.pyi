from trainwright.optim.gradients import Gradients
from trainwright.optim.groups import param_groups
from trainwright.optim.layerwise import Lamb, Lars
from trainwright.optim.optimizers import muon

__all__ = [
    "Gradients",
    "Lamb",
    "Lars",
    "muon",
    "param_groups",
]
