"""Passes over data without a trace: evaluate, predict, report."""
