from trainwright.modules.activations import checkpoint_activations
from trainwright.modules.flops import count_flops
from trainwright.modules.freezing import freeze, unfreeze
from trainwright.modules.modes import training_mode

__all__ = [
    "checkpoint_activations",
    "count_flops",
    "freeze",
    "training_mode",
    "unfreeze",
]
