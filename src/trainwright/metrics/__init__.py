"""Metrics: sums and counts, exact means, accuracy, top-k, and scores over all rows."""
