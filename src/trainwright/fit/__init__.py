"""One fit: the plan, entering and leaving a run, and the work between two updates."""
