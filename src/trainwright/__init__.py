"""Trainwright."""
