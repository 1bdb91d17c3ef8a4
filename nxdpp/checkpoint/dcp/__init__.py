"""Directories of torch.distributed.checkpoint: names and places of values, read and written rank by rank."""
