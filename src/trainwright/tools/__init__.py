"""Tools around a run: functions that take a Trainer, a model or data, and return records.

Each tool has its own file, with the record that it returns:

- `debug.py`: `smoke_run`, `overfit_batches`, `anomaly`, `deterministic`. `model_summary.py`: `summary`.
- `lr_search.py`: `find_lr`. `batch_search.py`: `find_batch_size`, and learning rates for other batch sizes.
- `cross_validation.py`: `cross_validate`. `sklearn_wrapper.py`: networks as scikit-learn estimators.
- `advising.py`: `advise`, which measures the techniques of `techniques.py` and adds the findings of `findings.py`.
- `trial.py`: trial updates with a variant of the trainer, for all tools. `trainer_snapshot.py`: restores the trainer.

Promises: a tool restores model, optimizers, random state and the order of the data exactly. It refuses unsupported
cases before it trains. Its record prints as text.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
