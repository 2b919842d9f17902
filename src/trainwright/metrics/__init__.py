"""Which numbers describe outputs and targets? Metrics as exact sums and counts, and how they cross the ranks.

A pass has one `MetricSet`: `update` with each batch gives every `PassMetric` output and target, `compute` reads them
once at the end. Another metric is a function or an object that is given to the Trainer; another *kind* of metric is a
subclass of `PassMetric` in `kinds.py`, and a line in `MetricSet.__init__`. A public name has a line in `__init__.pyi`,
from which the package takes its names (`core/lazy.py`).

Files in reading order:

- `metrics.py`: the metrics that a user names: `accuracy`, `top_k`, `over_all` for a function of all rows, `Derived`
- `scores.py`: `MAE`, `RMSE`, `R2`, `F1`, objects with `update`, `compute` and `reset`
- `metric_set.py`: the metrics of one pass, a list of accumulators: updated batch by batch, read once
- `kinds.py`: the accumulators of functions and of `over_all`; `objects.py`: that of an object of any library,
  torchmetrics and torcheval too
- `totals.py`: the sum and the count of one mean, on the host for CPU tensors, on the device else
- `reduce.py`: the one function that adds the numbers of all ranks up on rank 0

A number is a count-weighted mean over all rows and ranks, whatever the batches: sums are float64, counts whole
numbers. A NaN is never dropped. Nothing waits for the device before the numbers are read.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
