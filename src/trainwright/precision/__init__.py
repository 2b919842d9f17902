"""Mixed precision: autocast and the loss scale."""
