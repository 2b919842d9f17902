"""What watches a run."""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
