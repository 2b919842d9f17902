"""Who takes part in peers.py: loops written by hand, this package, and other libraries, one file per family."""
