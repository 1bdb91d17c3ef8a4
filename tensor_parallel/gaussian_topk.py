"""Feed-forward of Gemma 3n whose features are divided."""

from typing import Any

import torch
from torch import nn

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.mappings import gather_from_sequence_parallel_region


class WholeGaussianTopk(nn.Module):
    """Activation that keeps features above a mean and deviation of all features, on all ranks."""

    def _gaussian_topk(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's features ``(B, T, I / ranks)`` of the activation of ``inputs`` on all ranks."""
        own = inputs.shape[-1]
        # The gradient of a rank's features goes to the features of all ranks, by the mean and the deviation.
        whole = gather_from_sequence_parallel_region(inputs, sequence_dimension=-1)
        base: Any = super()
        kept: torch.Tensor = base._gaussian_topk(whole)
        return kept.narrow(-1, parallel_state.get_tensor_model_parallel_rank() * own, own)
