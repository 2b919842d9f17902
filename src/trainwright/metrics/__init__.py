"""Metrics of outputs and targets, as exact sums and counts, and their reduction over ranks.

Each pass has one `MetricSet`: `update` passes output and target of a batch to every `PassMetric`, and `compute` reads
the results once at the end. A new metric is a function or an object that is given to the Trainer. A new *kind* of
metric is a subclass of `PassMetric` in `kinds.py` and a line in `MetricSet.__init__`. Public names are listed in
`__init__.pyi` (see `core/lazy.py`).

Files in reading order:
`metrics.py`: the public metrics `accuracy`, `top_k`, `over_all` (a function of all rows), `Derived`.
`scores.py`: `MAE`, `RMSE`, `R2`, `F1`, objects with `update`, `compute` and `reset`.
`metric_set.py`: the metrics of one pass, updated batch by batch and read once.
`kinds.py`: the accumulators of functions and of `over_all`. `objects.py`: that of metric objects, including those of
torchmetrics and torcheval.
`totals.py`: sum and count of one mean, on the host for CPU tensors, else on the device.
`reduce.py`: the reduction of the numbers of all ranks to rank 0.

A number is the count-weighted mean over all rows and ranks, independent of the batch size: sums are float64, counts are
integers. A NaN is never dropped. Nothing waits for the device before the numbers are read.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
