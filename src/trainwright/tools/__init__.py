"""What can be found out or done about a run from outside? Functions that take a Trainer, or data, and return records.

Each tool is a file of its own, with the record that it returns:

- `debug.py`: `smoke_run`, `overfit_batches`, `anomaly`, `deterministic`. `model_summary.py`: `summary`.
- `lr_search.py`: `find_lr`. `batch_search.py`: `find_batch_size`, and learning rates for other batch sizes.
- `cross_validation.py`: `cross_validate`. `sklearn_wrapper.py`: networks as scikit-learn estimators.
- `advising.py`: `advise`, which tries and measures what `techniques.py` lists and adds `findings.py`.
- `trial.py`: updates of a variant of the trainer, for all of these; `trainer_snapshot.py`: restores the trainer.

Promises: a tool leaves model, optimizers, random state and the order of the data exactly as it found them; it refuses
what it cannot do before it trains; its record prints as text.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
