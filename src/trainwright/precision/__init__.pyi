from trainwright.precision.base import LossScale, Precision
from trainwright.precision.mixed_precision import LossScaler, MixedPrecision

__all__ = [
    "LossScale",
    "LossScaler",
    "MixedPrecision",
    "Precision",
]
