"""The dtypes of CUDA's autocast on CPU tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from nxdpp.tracing.costs.cuda_modes import CudaAutocast

OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x.float(), x.float()),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax with a dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "sum into out=": lambda x: torch.sum(x, dim=-1, out=torch.empty(4, dtype=x.dtype, device=x.device)),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "pow": lambda x: x.pow(2),
    "sum": lambda x: x.sum(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "gelu": F.gelu,
    "mixed": lambda x: x * x.float(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_dtypes_are_those_on_cuda(name: str) -> None:
    """Fake tensors of CUDA need no device where no gradient is asked for."""
    found = {}
    for kind in ("cuda", "cpu"):
        mode: AbstractContextManager[Any] = nullcontext()
        if kind == "cpu":
            mode = CudaAutocast()
        with torch.no_grad(), FakeTensorMode(), mode:
            x = torch.empty(4, 8, device=kind, dtype=torch.bfloat16)
            # A context of torch.autocast turns itself off without a device.
            usual = torch.get_autocast_dtype(kind)
            torch.set_autocast_dtype(kind, torch.bfloat16)
            torch.set_autocast_enabled(kind, True)
            try:
                found[kind] = OPERATIONS[name](x).dtype
            finally:
                torch.set_autocast_enabled(kind, False)
                torch.set_autocast_dtype(kind, usual)
    assert found["cpu"] == found["cuda"]
