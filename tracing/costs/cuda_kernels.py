"""CUDA's kernels of dropout for runs on fake CPU tensors, which take several operations for it.

Attention with dropout is one kernel on CUDA. On a CPU it makes, and autograd saves, the probabilities ``(B, H, T, T)``.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT_OF_ATTENTION = 4  # its position: query, key, value, attn_mask, dropout_p


class CudaKernels(TorchFunctionMode):
    """Mode in which dropout is one operation, and none of its own inside attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or what has the cost of its kernel."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            before, after = args[:_DROPOUT_OF_ATTENTION], args[_DROPOUT_OF_ATTENTION + 1 :]
            args, kwargs = (before, {**kwargs, "dropout_p": 0.0}) if not after else ((*before, 0.0, *after), kwargs)
        elif func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else F.dropout(input, p, training)
