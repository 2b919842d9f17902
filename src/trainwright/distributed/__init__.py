"""The only package that imports `torch.distributed`: ranks, start and launch, DDP, FSDP, failures of peers."""
