"""The PyTorch training loop, exact, fast and readable: one Trainer, named slots, hooks, observers."""

from trainwright.core.lazy import lazy_names
from trainwright.trainer import Trainer as Trainer  # imported eagerly; all other names on first use

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__)
