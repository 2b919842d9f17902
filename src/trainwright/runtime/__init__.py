"""The ground: devices, modules, gradients, randomness, storage."""
