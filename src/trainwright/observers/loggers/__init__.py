"""Observers that write to experiment trackers."""
