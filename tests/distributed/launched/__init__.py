"""Processes that are started by launch or torchrun, or that wait in a pool: how they run, resume and end."""
