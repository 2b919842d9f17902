"""How are gradients turned into new weights? Optimizers, gradients and weight averages.

Read in this order:
- `optimizers`: `adamw`, `sgd`, `muon`, functions that make an optimizer for a model with parameter groups.
- `layerwise`: the optimizers `Lars` and `Lamb` for large batches.
- `gradients`: zero, scale, check and measure the gradients of an update; `clip`: limit them.
- `fused`: steps without torch's wrapper, by fused kernels where torch has them.
- `averaging`: the settings `EMA` and `SWA`, and the averages of one model during one `fit`.
- `named`: makes optimizers from what a user gives as `optimizer=`, checks `clip=` and `schedule=`.

A step changes weights bit for bit as torch's own step does. Clipping sums norms in the model's order, as
`torch.nn.utils.clip_grad_norm_` does. Nothing here knows of a trainer.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
