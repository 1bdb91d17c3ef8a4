"""Alias of NeuronX Distributed's path: ``AdamW_FP32OptimParams``."""

from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams

__all__ = ["AdamW_FP32OptimParams"]
