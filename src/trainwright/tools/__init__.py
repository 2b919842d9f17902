"""Functions that take a trainer: what is done about a run."""
