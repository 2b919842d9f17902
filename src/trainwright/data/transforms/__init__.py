"""Transforms of batches: padding, bucketing, augmentation, loaders side by side."""
