"""How are gradients turned into new weights? Optimizers, gradients and weight averages.

Read in this order:
- `optimizers`: `adamw`, `sgd`, `muon`, functions that make an optimizer for a model; `groups`: its parameter groups.
- `layerwise`: the optimizers `Lars` and `Lamb` for large batches.
- `gradients`: zero, scale, check and measure the gradients of an update; `clip`: limit them.
- `fused`: steps without torch's wrapper, by fused kernels where torch has them.
- `averaging`: the settings `EMA` and `SWA`, and the averages of one model during one `fit`.
- `named`: makes optimizers from what a user gives as `optimizer=`, checks `clip=` and `schedule=`.

A step changes weights bit for bit as torch's own step does. Clipping sums norms in the model's order, as
`torch.nn.utils.clip_grad_norm_` does. Nothing here knows of a trainer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.optim.gradients import Gradients
    from trainwright.optim.groups import param_groups
    from trainwright.optim.layerwise import Lamb, Lars
    from trainwright.optim.optimizers import muon

__all__ = ["Gradients", "Lamb", "Lars", "muon", "param_groups"]

_FILES = {
    "gradients": ("Gradients",),
    "groups": ("param_groups",),
    "layerwise": ("Lamb", "Lars"),
    "optimizers": ("muon",),
}
"""The public names by file. Each file is imported when one of its names is first read."""


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
