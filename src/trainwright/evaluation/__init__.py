"""How good is the model on data, and what does it predict? Passes without side effects: evaluate, predict, report.

`Trainer.evaluate` calls `evaluate`, which makes the metrics of the pass and a `LossTracker`, enters `side_effect_free`,
and runs the step on each batch; `LossTracker.merge` adds the ranks up, and rank 0's numbers are broadcast.

Files in reading order:

- `passes.py`: `evaluate`, and `side_effect_free`, the context of every pass: eval mode, evaluation weights, no gradient
- `weights.py`: the evaluation weights where they are not the trained ones, averaged weights
- `predictions.py`: `predict`, the outputs of all batches joined in the order of the data
- `reports.py`: `report`, scikit-learn's report on classes, or R2, MAE and RMSE, and which of both it is

A pass leaves the modes, random states, gradients, buffers, `state` and the data's position as they were. Every row
counts once over all ranks; numbers are reduced to rank 0 and broadcast.
"""
