"""A user's own `DataLoader`, iterated as the plain loop does and resumed exactly."""
