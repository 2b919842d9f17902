"""Several processes: what they compute together, how their models are sharded, how they find each other."""
