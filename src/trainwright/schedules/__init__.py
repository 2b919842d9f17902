"""The learning rate as a function of applied updates."""
