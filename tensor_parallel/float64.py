"""Float64 throughout a model, so that a comparison of two computations shows errors and no rounding.

Models convert to float32 in places, such as norms and softmax. These conversions become ones to float64::

    model of float64 ─▶ norm: x.to(torch.float32) ─▶ product in float64     rounding of 1e-7 in each norm
    under Float64    ─▶ norm: x.to(torch.float64) ─▶ product in float64     rounding of 1e-16
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Context in which torch's functions take ``torch.float64`` for ``torch.float32``, and ``double`` for ``float``.

    A model is built outside of it: initial weights would be other ones.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with float64 for float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def to_float64(model: nn.Module) -> nn.Module:
    """Convert floating tensors of ``model`` to float64 in place; return ``model``."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            # torch's grouped products take no float64.
            config._experts_implementation = "eager"
    return nn.Module.to(model, dtype=torch.float64)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
