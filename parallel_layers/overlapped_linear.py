"""Linear operation of a column-parallel layer, whose input-gradient is summed while the weight-gradient is computed.

The operation is five nodes of the autograd graph. The engine runs, of the nodes that are ready, the one that was
created last. So the order of creation gives the order of the backward::

    created                    backward, from the last one
    1 _Finish   x              5 _Join          gradient of y to 4 and 2
    2 _Weight   token          4 mm or addmm    input-gradient = gradient of y @ W
    3 _Start    x              3 _Start         start its all-reduce
    4 mm        x @ W.T        2 _Weight        weight-gradient = (gradient of y).T @ x
    5 _Join     y, token       1 _Finish        wait for the all-reduce

Nodes 2 and 4 compute one gradient each. So a split backward (``pipeline/backward``) runs 5, 4, 3, 1 for the
input-gradient, and 5, 2 later. Under sequence parallelism node 3 gathers the sequence, and its gradient is
reduce-scattered. Node 2 keeps this rank's part of the sequence only, and gathers it again.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from nxdpp.parallel_layers.collectives import all_gather, size_of, start_all_reduce, start_reduce_scatter, wait


class Sequence(NamedTuple):
    """The dimension of the sequence, and the group over which it is divided."""

    dim: int
    group: ProcessGroup | None


class Part(NamedTuple):
    """This rank's rows of a weight ``(O, I)``, and its bias ``(O,)`` or ``None``."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def overlapped_linear(
    x: torch.Tensor, parts: list[Part], group: ProcessGroup | None = None, sequence_dimension: int | None = None
) -> list[torch.Tensor]:
    """Return ``x @ weight.T + bias`` of shape ``(..., O)`` for each part.

    The gradient of ``x`` is the sum over the parts and over ``group``, in one message. With several parts there are
    nodes 2, 4 and 5 of each, and node 3 runs after all nodes 4.

    Args:
        x: ``(..., I)``, the same on all ranks; under sequence parallelism this rank's part of the sequence.
        parts: weights and biases.
        group: this rank's tensor group by default.
        sequence_dimension: the dimension of ``x`` along which the sequence is divided; ``None`` for no division.
    """
    device = x.device.type
    # Autocast leaves float64 as it is.
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        parts = [Part(weight.to(dtype), None if bias is None else bias.to(dtype)) for weight, bias in parts]
    with torch.autocast(device, enabled=False):
        sequence = None if sequence_dimension is None else Sequence(sequence_dimension, group)
        shape = x.shape
        if sequence is None:
            x = x.reshape(-1, shape[-1])
        finished = _Finish.apply(x)  # type: ignore[no-untyped-call]
        tokens = [_Weight.apply(finished.detach(), *part, sequence) for part in parts]  # type: ignore[no-untyped-call]
        started = _Start.apply(finished, group, sequence)  # type: ignore[no-untyped-call]
        rows = started.reshape(-1, shape[-1])
        products = [
            functional.linear(rows, weight.detach(), None if bias is None else bias.detach()) for weight, bias in parts
        ]
        joined = [_Join.apply(*both) for both in zip(products, tokens, strict=True)]  # type: ignore[no-untyped-call]
        outer = shape[:-1] if sequence is None else started.shape[:-1]
        return [each.view(*outer, each.shape[-1]) for each in joined]


class _Finish(torch.autograd.Function):
    """End of the collective of the input-gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Wait for the gradient."""
        return wait(gradients[0])


class _Start(torch.autograd.Function):
    """Begin of the collective of the input-gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup | None, sequence: Sequence | None) -> torch.Tensor:
        """Return the input, or the whole sequence."""
        ctx.group, ctx.sequence = group, sequence
        return x.detach() if sequence is None else all_gather(x, sequence.dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Start the sum of all ranks' gradients, of which no other node reads the content before ``_Finish``."""
        (gradient,) = gradients
        if ctx.sequence is None:
            return start_all_reduce(gradient, ctx.group), None, None
        return start_reduce_scatter(gradient, ctx.sequence.dim, ctx.group), None, None


class _Weight(torch.autograd.Function):
    """Gradients of weight and bias, without a part in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sequence: Sequence | None
    ) -> torch.Tensor:
        """Return a tensor without memory that has the shape of the product."""
        ctx.save_for_backward(x)
        ctx.sequence = sequence
        rows = x.numel() // x.shape[-1]
        if sequence is not None:
            rows *= size_of(sequence.group)
        return weight.new_zeros(()).expand(rows, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None, None]:
        """Compute both gradients from that of the product."""
        (gradient,) = gradients
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        weight_gradient = None
        if needs_weight:
            (x,) = ctx.saved_tensors
            if ctx.sequence is not None:
                x = all_gather(x, ctx.sequence.dim, ctx.sequence.group)
            weight_gradient = gradient.t().mm(x.reshape(-1, x.shape[-1]))
        return None, weight_gradient, gradient.sum(0) if needs_bias else None, None


class _Join(torch.autograd.Function):
    """The product, whose gradient goes to both of its sources."""

    computes_each_gradient_alone = True
    """A split backward may run the node once for each gradient: it computes nothing."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Return ``product``, in place: unlike a view of a custom function it may be changed in place later."""
        ctx.mark_dirty(product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient twice."""
        (gradient,) = gradients
        return gradient, gradient
