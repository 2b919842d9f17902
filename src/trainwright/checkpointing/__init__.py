"""Checkpoints: written atomically, verified when read, kept by rule, and resumed from."""
