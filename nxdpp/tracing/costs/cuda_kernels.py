"""CUDA's kernels of attention and dropout for runs on fake tensors, which take several operations for them.

Attention with dropout is one kernel on CUDA. On a CPU it makes, and autograd saves, the probabilities
``(B, H, T, T)``. A CPU also repeats keys and values that several heads share.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nxdpp.ground.torch_names import CPU_ATTENTION

_HALF_BYTES = 2
_BATCH_HEADS_TOKENS_WIDTH = 4


class CudaKernels(TorchFunctionMode):
    """Mode in which dropout is one operation, and attention one of CUDA's, which keeps no probabilities."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or what has the cost of its kernel."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Attention without dropout; in half precision without a mask heads may share keys, and values be narrower."""
    if attn_mask is not None or query.itemsize > _HALF_BYTES or query.ndim != _BATCH_HEADS_TOKENS_WIDTH:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **others)
    missing = query.shape[-1] - value.shape[-1]
    padded = F.pad(value, (0, missing)) if missing else value
    attended: torch.Tensor = CPU_ATTENTION.found(query, key, padded, 0.0, is_causal)[0]
    return attended[..., : value.shape[-1]] if missing else attended


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else F.dropout(input, p, training)
