"""Tensor parallelism: layers that ranks divide, mappings and collectives between them, and plans of models."""
