"""Process groups, and what runs over them besides the pipeline."""

from nxdpp.parallel_layers.move_model_to_device import move_model_to_device

__all__ = ["move_model_to_device"]
