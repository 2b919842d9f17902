"""Optimizers, gradients, gradient clipping and weight averages.

Files in reading order:
`optimizers.py`: `adamw`, `sgd` and `muon`, which make an optimizer for a model with parameter groups.
`layerwise.py`: the optimizers `Lars` and `Lamb` for large batches.
`gradients.py`: zeroes, scales, checks and measures the gradients of an update. `clip.py`: clips them.
`fused.py`: optimizer steps without torch's wrapper, by fused kernels if torch has them.
`averaging.py`: the settings `EMA` and `SWA`, and the averages of one model during one `fit`.
`named.py`: makes optimizers from `optimizer=`; checks `clip=` and `schedule=`.

A step changes weights bit for bit as torch's own step does. Clipping sums norms in the order of the model's parameters,
as `torch.nn.utils.clip_grad_norm_` does. Nothing here depends on the trainer.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
