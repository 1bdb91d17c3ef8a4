"""Backward of one stage: received tensors enter its autograd graph, and autograd runs from its roots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nxdpp.devices.autocast import AUTOCAST_TYPES, without_autocast
from nxdpp.ground.torch_names import ENGINE

# A received tensor enters the graph together with this one, which makes it require a gradient and gets none.
with torch.inference_mode(mode=False):
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class ReceivedTensor:
    """A tensor from another stage, such as (B, T, H), and later its gradient.

    In the graph it is not a leaf: a layer may change it in place, as in one process.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = tensor

    def enter_graph(self) -> torch.Tensor:
        """Return the tensor in a graph whose backward sets ``gradient``."""
        entered: torch.Tensor = _enter(_ANCHOR, self)
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, received: ReceivedTensor) -> torch.Tensor:
        """Return the tensor, which requires a gradient because ``anchor`` does."""
        ctx.received = received
        # A function after it may give no gradient; zeros would be one.
        ctx.set_materialize_grads(False)
        # Nothing but the graph holds the tensor from here on.
        tensor, received.tensor = received.tensor, None
        assert tensor is not None, "it enters once"
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        """Keep the gradient for the source stage."""
        (ctx.received.gradient,) = gradients
        return None, None


# ``_Enter.apply`` without its Python code, which looks for the transforms of torch.func: no stage runs within one.
_enter: Any = super(torch.autograd.Function, _Enter).apply


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return ``get_gradient_edge(tensor)``, in a third of its time for a tensor that an operation of torch has made."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[GradientEdge] = (),
    retain: bool = False,
    accumulate: bool = True,
) -> Sequence[torch.Tensor | None]:
    """Run ``torch.autograd.backward`` from ``roots``; with ``accumulate=False`` return the gradients of ``inputs``.

    This calls autograd's engine without the Python code around it, which costs more than a small call. Autocast is off
    in it, as torch advises: an operation that ran in float32 inside autocast has its backward in float32.

    Args:
        gradients: the roots' gradients, of their shapes and dtypes; not checked.
        retain: keep the graph for another backward.
    """
    is_on = any(map(torch.is_autocast_enabled, AUTOCAST_TYPES))
    run = _run_without_autocast if is_on else ENGINE.found.run_backward
    # Keywords take longer than positions: create_graph, and allow_unreachable before accumulate_grad.
    found: Sequence[torch.Tensor | None] = run(
        tuple(roots), tuple(gradients), retain, False, tuple(inputs), True, accumulate
    )
    return found


def _run_without_autocast(*arguments: Any) -> Any:
    with without_autocast():
        return ENGINE.found.run_backward(*arguments)
