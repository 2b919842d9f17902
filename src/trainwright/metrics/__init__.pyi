from trainwright.metrics.metrics import Derived, accuracy, over_all, top_k
from trainwright.metrics.scores import F1, MAE, R2, RMSE

__all__ = [
    "F1",
    "MAE",
    "R2",
    "RMSE",
    "Derived",
    "accuracy",
    "over_all",
    "top_k",
]
