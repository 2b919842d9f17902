"""Functions on a user's `nn.Module`: modes, freezing, parameter matching, activation checkpointing, FLOPs."""
