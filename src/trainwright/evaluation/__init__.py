"""Passes over data without side effects: evaluate, predict, report.

`Trainer.evaluate` calls `evaluate`. It creates the metrics of the pass and a `LossTracker`, enters `side_effect_free`,
and runs the step on each batch. `LossTracker.merge` sums over ranks, and rank 0 broadcasts the numbers.

Files in reading order:

- `passes.py`: `evaluate`, and `side_effect_free`, the context of every pass: eval mode, evaluation weights, no gradient
- `weights.py`: the evaluation weights: trained, averaged, or those of the optimizer
- `predictions.py`: `predict`: the outputs of all batches, joined in the order of the data
- `reports.py`: `report`: scikit-learn's classification report, or R2, MAE and RMSE

A pass restores modes, random states, gradients, buffers, `state` and the position in the data. Each row counts once
over all ranks. Numbers are reduced to rank 0 and broadcast.
"""
