"""One update: the window, its losses and counts, the finite check, and the step."""
