"""Several processes: what they compute together, how they start and how they end."""
