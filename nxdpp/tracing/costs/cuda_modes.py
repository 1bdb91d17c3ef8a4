"""CUDA's lists of autocast, and its kernels of attention and dropout, for runs on fake CPU tensors.

The CPU's own lists convert fewer operations to float32. The names here are those of "CUDA Ops that can autocast to
float32" in torch's documentation.

Attention with dropout is one kernel on CUDA. On a CPU it makes, and autograd saves, the probabilities
``(B, H, T, T)``. A CPU also repeats keys and values that several heads share.
"""

from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nxdpp.devices import CUDA
from nxdpp.ground.torch_names import CPU_ATTENTION, FAKE_MODE, NO_DISPATCH_MODES, NO_TORCH_FUNCTION
from nxdpp.tracing.costs.run_node import map_tensors

_HALF_BYTES = 2
_BATCH_HEADS_TOKENS_WIDTH = 4
_HALF = (torch.float16, torch.bfloat16)
# These convert their result, not their input.
_WITH_DTYPE = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
_IN_FLOAT32 = frozenset(
    {
        *("layer_norm", "group_norm", "norm", "dist", "cdist", "renorm", "cosine_similarity", "softplus"),
        *("pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "__rdiv__", "__rtruediv__"),
        *("exp", "expm1", "log", "log2", "log10", "log1p", "logsumexp"),
        *("acos", "asin", "cosh", "sinh", "tan", "erfinv"),
        *("binary_cross_entropy_with_logits", "kl_div", "l1_loss", "smooth_l1_loss", "soft_margin_loss"),
        *("nll_loss", "mse_loss", "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss"),
        *("margin_ranking_loss", "multilabel_margin_loss", "multi_margin_loss", "triplet_margin_loss"),
    }
)


class CudaAutocast(TorchFunctionMode):
    """Mode in which operations on half tensors give float32 where they do under CUDA's autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` in the dtype of CUDA's list."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _IN_FLOAT32 or (name == "rms_norm" and _converts_rms_norm()):
            args, kwargs = map_tensors(_in_float32, (args, kwargs))
        elif name in _WITH_DTYPE and _gives_half(*args, **kwargs):
            # A dtype of None may be the last positional argument.
            args = args[:-1] if args and args[-1] is None else args
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


@cache
def _converts_rms_norm() -> bool:
    """Return whether this version's list has ``rms_norm``; that of torch 2.9 has not."""
    # Fake tensors of CUDA need no device where no gradient is asked for; torch.autocast would turn itself off.
    enabled, usual = torch.is_autocast_enabled(CUDA), torch.get_autocast_dtype(CUDA)
    torch.set_autocast_enabled(CUDA, True)
    torch.set_autocast_dtype(CUDA, torch.bfloat16)
    try:
        with NO_TORCH_FUNCTION(), NO_DISPATCH_MODES(), torch.no_grad(), FAKE_MODE():
            return F.rms_norm(torch.empty(1, device=CUDA, dtype=torch.bfloat16), (1,)).dtype == torch.float32
    finally:
        torch.set_autocast_enabled(CUDA, enabled)
        torch.set_autocast_dtype(CUDA, usual)


def _gives_half(input: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> bool:
    has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    return input.dtype in _HALF and out is None and not has_dtype


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


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
