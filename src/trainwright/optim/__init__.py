"""Optimizers, parameter groups, gradients, clipping, averaged weights, and fused steps."""
