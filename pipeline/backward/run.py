"""Autograd's engine without the Python around ``torch.autograd.backward``, which costs more than a small call."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[GradientEdge] = (),
    retain: bool = False,
    accumulate: bool = True,
) -> Sequence[torch.Tensor | None]:
    """``torch.autograd.backward`` from ``roots``, or with ``accumulate=False`` the gradients of ``inputs``.

    Args:
        gradients: of the roots, of their shapes and dtypes; not checked.
        retain: keep the graph for another backward.
    """
    found: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), retain, False, tuple(inputs), allow_unreachable=True, accumulate_grad=accumulate
    )
    return found
