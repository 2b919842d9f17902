"""What can be found out or done about a run from outside? Functions that take a Trainer, or data, and return records.

Files in reading order:
`sanity`: `smoke_run` and `overfit_batches`, checks before a long run. `debug`: `anomaly` and `deterministic`.
`summary`: layers, shapes, operations and memory of a model. `lr_search`: `find_lr`. `batch_search`: `find_batch_size`,
scaled rates. `cross_validate`: folds, and predictions for rows left out. `sklearn_wrapper`: scikit-learn estimators.
`advising`: `advise`, which tries `techniques` with `timing`, adds `findings` and returns an `advice` record.
`trial` and `trainer_snapshot`: training that is undone afterwards, for all of these.

Promises: a tool leaves model, optimizers, random state and the order of the data exactly as it found them; it refuses
what it cannot do before it trains; its record prints as text.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
