from trainwright.tools.advising import Advice, Effect, advise
from trainwright.tools.batch_search import LargestBatch, find_batch_size, linear_scaled, sqrt_scaled
from trainwright.tools.cross_validation import CrossValidation, Fold, cross_validate
from trainwright.tools.debug import Overfit, SmokeRun, anomaly, deterministic, overfit_batches, smoke_run
from trainwright.tools.lr_search import LRRange, find_lr
from trainwright.tools.model_summary import summary
from trainwright.tools.sklearn_wrapper import SklearnClassifier, SklearnRegressor

__all__ = [
    "Advice",
    "CrossValidation",
    "Effect",
    "Fold",
    "LRRange",
    "LargestBatch",
    "Overfit",
    "SklearnClassifier",
    "SklearnRegressor",
    "SmokeRun",
    "advise",
    "anomaly",
    "cross_validate",
    "deterministic",
    "find_batch_size",
    "find_lr",
    "linear_scaled",
    "overfit_batches",
    "smoke_run",
    "sqrt_scaled",
    "summary",
]
