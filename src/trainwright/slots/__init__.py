"""What changes a run; each part also works without the Trainer."""
