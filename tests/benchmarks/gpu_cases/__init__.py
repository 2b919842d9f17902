"""The cases of gpu.py: what is trained, who trains it, how that is measured, and what it is to reach."""
