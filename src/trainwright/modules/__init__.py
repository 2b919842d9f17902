"""Functions on a user's `nn.Module`: what changes in a model besides its weights, and how it is restored.

Read in this order:
- `modes.py`: train and eval mode; contexts that restore modes, gradients and buffers (`training_mode`).
- `freezing.py`: parameters and norm layers that are not trained (`freeze`, `unfreeze`); `matching.py` finds the modules
  and parameters that a name, a glob, a class or a predicate selects.
- `activations.py`: activation checkpointing of blocks (`checkpoint_activations`).
- `flops.py`: floating-point operations, counted on the meta device (`count_flops`).
- `peak_memory.py`: the peak of memory, by the allocator of a device or by counting live tensors.
- `dtensors.py`: shards of DTensors: complete tensors, norms and clips over all ranks.

What these functions change in a module is undone by their counterpart or at the end of their context, also on an error.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
