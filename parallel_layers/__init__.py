"""Process groups, the failure watch, and collective operations outside the pipeline."""

from nxdpp.parallel_layers.move_model_to_device import move_model_to_device

__all__ = ["move_model_to_device"]
