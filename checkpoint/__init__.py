"""Pretrained weights: Hugging Face directories, read and written by all ranks, each its own part."""
