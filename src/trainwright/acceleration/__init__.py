"""Compiling, memory layout, data on the device, batches moved ahead, out-of-memory splitting."""
