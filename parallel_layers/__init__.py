"""Process groups, the failure watch, and collective operations outside the pipeline."""

from nxdpp.parallel_layers.gradient_norm import clip_grad_norm
from nxdpp.parallel_layers.move_model_to_device import move_model_to_device

__all__ = ["clip_grad_norm", "move_model_to_device"]
