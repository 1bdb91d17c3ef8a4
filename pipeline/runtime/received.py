"""A tensor that came from another stage, on its way into this stage's autograd graph."""

from typing import Any

import torch

# What a tensor enters a graph beside: it requires a gradient, and gets none.
_ANCHOR = torch.empty(0, requires_grad=True)

# The tensor's own, and that of the storage object that is asked.
_OWN_USES = 2


class Arrival:
    """A received tensor, and later its gradient.

    In the graph it is no leaf, so that a layer may change it in place as it may its input in one process.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        self._tensor: torch.Tensor | None = tensor

    def take(self) -> torch.Tensor:
        """The tensor, which nobody else holds any more."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "taken once"
        return tensor

    def enter_graph(self) -> torch.Tensor:
        """The tensor, in a graph whose backward leaves its gradient here."""
        entered: torch.Tensor = _Enter.apply(_ANCHOR, self)  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Give the tensor a place in the graph; ``anchor`` makes it require a gradient."""
        ctx.arrival = arrival
        return arrival.take()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        """Keep the gradient for the stage that made the tensor."""
        (ctx.arrival.gradient,) = gradients
        return None, None


def own_memory(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient``, or a copy where another tensor has the same memory.

    Autograd may have made it a parameter's ``.grad``, too (positions that are added to a batch of one row), to which
    the next microbatch adds in place, perhaps before this one has left.
    """
    storage = gradient.untyped_storage()
    return gradient if torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES else gradient.clone()
