"""Observers that write the numbers of a run to experiment trackers: `tensorboard.py`."""
