"""Tensor parallelism for unmodified Hugging Face models."""
