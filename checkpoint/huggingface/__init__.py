"""Hugging Face checkpoints, read and written rank by rank."""
