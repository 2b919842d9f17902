"""The PyTorch training loop, exact, fast and readable: one Trainer, named slots, hooks, observers."""

from trainwright.core.lazy import lazy_names
from trainwright.trainer import Trainer as Trainer  # the loop and all that it needs, before a first `fit`

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__)
