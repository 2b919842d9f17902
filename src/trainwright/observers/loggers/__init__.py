"""Loggers write the numbers of a run to trackers of experiments.

`base.py` turns records into named numbers and catches what a tracker raises; `tensorboard.py`, `csv_file.py`,
`weights_and_biases.py` and `mlflow_tracking.py` each open, write and close one tracker.
"""
