"""Checkpoints of a training that any layout of ranks loads."""
