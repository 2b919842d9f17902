"""Functions on the user's `nn.Module`: modes, freezing, activation checkpointing, FLOPs, peak memory, shards.

Files in reading order:
`modes.py`: train and eval mode; context managers that restore modes, gradients and buffers (`training_mode`).
`freezing.py`: parameters and norm layers that are not trained (`freeze`, `unfreeze`). `matching.py`: the modules and
parameters that a name, a glob or a class selects.
`activations.py`: activation checkpointing of blocks (`checkpoint_activations`).
`flops.py`: floating-point operations, counted on the meta device (`count_flops`).
`peak_memory.py`: peak memory, by the allocator of a device or by a count of live tensors.
`dtensors.py`: DTensors: complete tensors, norms and clips over all ranks.

All changes to a module are undone by a counterpart, or at the end of a context, also after an error.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
