"""The only layer that imports torch.distributed."""
