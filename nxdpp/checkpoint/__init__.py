"""Checkpoints, which each rank reads and writes for its own part of the model."""
