"""The dtype of a value, where it follows from the specs of the inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from nxdpp.tracing.sizes.input_specs import InputSpec, spec_of

KEPT: dict[str, Callable[[Any], Any]] = {
    "to a device": lambda x: x.to(x.device),
    "to a device, not waiting": lambda x: x.to(x.device, non_blocking=True),
    "view": lambda x: x.view(-1, x.shape[0]),
    "view of a size": lambda x: x.view(x.size()),
    "item": lambda x: x[..., 1:].contiguous(),
    "chain": lambda x: x.unsqueeze(1).expand(2, 3, 4).reshape(-1).clone().detach(),
}
CHANGED: dict[str, tuple[Callable[[Any], Any], torch.dtype | None]] = {
    "long": (lambda x: x.float().long(), torch.int64),
    "to a dtype": (lambda x: x.to(torch.bfloat16), torch.bfloat16),
    "to a keyword dtype": (lambda x: x.to(device=x.device, dtype=torch.half), torch.float16),
    "view as a dtype": (lambda x: x.view(torch.int32), torch.int32),
    "to like another": (lambda x: x.to(x @ x), None),
    "product": (lambda x: x @ x, None),
    "to a dtype that is not known": (lambda x: x.to((x @ x).dtype), None),
}


def _dtype(function: Callable[[Any], Any], own: torch.dtype) -> torch.dtype | None:
    graph = fx.symbolic_trace(function).graph
    next(iter(graph.nodes)).meta["spec"] = InputSpec(2, own)
    (result,) = next(node.args for node in graph.nodes if node.op == "output")
    assert isinstance(result, fx.Node)
    return spec_of(result, nn.Module()).dtype


@pytest.mark.parametrize("name", KEPT)
def test_a_method_that_keeps_the_dtype(name: str) -> None:
    assert _dtype(KEPT[name], torch.int64) is torch.int64
    assert _dtype(KEPT[name], torch.float32) is torch.float32


@pytest.mark.parametrize("name", CHANGED)
def test_a_method_that_changes_the_dtype(name: str) -> None:
    function, dtype = CHANGED[name]
    assert _dtype(function, torch.float32) is dtype
