"""Linear operation of a column-parallel layer, whose input-gradient is summed while the weight-gradient is computed.

The operation is five nodes of the autograd graph. Of the nodes that are ready, the engine runs the one that was
created last. So the order of creation gives the order of the backward::

    created                    backward, from the last one
    1 _Finish   x              5 _Join          gradient of y to 4 and 2
    2 _Weight   token          4 mm or addmm    input-gradient = gradient of y @ W
    3 _Start    x              3 _Start         start its all-reduce
    4 mm        x @ W.T        2 _Weight        weight-gradient = (gradient of y).T @ x
    5 _Join     y, token       1 _Finish        wait for the all-reduce

Nodes 2 and 4 compute one gradient each. So a split backward (``pipeline/backward``) runs 5, 4, 3, 1 for the
input-gradient, and 5, 2 later. Under sequence parallelism node 3 gathers the sequence, and its gradient is
reduce-scattered. Node 2 keeps this rank's part of the sequence only, and gathers it again. Weights with one input
gather it once.

The backward of a compiled module is one operation, and its order is the backend's. There, all is one node
(``_Products``) under sequence parallelism, and torch's own nodes without.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nxdpp.tensor.collectives import (
    all_gather,
    outside_of_graph,
    reduce_scatter,
    size_of,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)


class WeightRows(NamedTuple):
    """This rank's rows of a weight ``(O, I)``, and its bias ``(O,)`` or ``None``."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def overlapped_linear(
    x: torch.Tensor,
    parts: list[WeightRows],
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return ``x @ weight.T + bias`` of shape ``(..., O)`` for each part; arguments as of ``SharedInput``."""
    shared = SharedInput(x, parts, sequence_dimension, reduce_dtype)
    return [shared.product(index) for index in range(len(parts))]


def is_trained(x: torch.Tensor, parts: list[WeightRows]) -> bool:
    """Return whether the product of ``x`` and ``parts`` has a gradient of ``x`` and of a weight."""
    return torch.is_grad_enabled() and x.requires_grad and any(part.weight.requires_grad for part in parts)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the input ``x`` of a linear layer. It leaves float64 as it is."""
    device = x.device.type
    is_converted = not x.is_meta and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_converted else None


class SharedInput:
    """Input of several parts, whose products may be computed one after another, by the code of a model.

    The gradient of ``x`` is the sum over the parts and over the tensor group, in one message. With several parts there
    are nodes 2, 4 and 5 of each, and node 3 runs after all nodes 4. A part without a product does not matter.

    Args:
        x: ``(..., I)``, the same on all ranks; under sequence parallelism this rank's part of the sequence.
        parts: weights and biases.
        sequence_dimension: the dimension of ``x`` along which the sequence is divided; ``None`` for no division.
        reduce_dtype: of the sum over the tensor group, by default that of the gradient. The sum in a different dtype
            is finished before the weight-gradients.

    Attributes:
        whole: ``(..., I)``, ``x`` of the whole sequence. Its own gradient joins the sum.
    """

    whole: torch.Tensor

    def __init__(
        self,
        x: torch.Tensor,
        parts: list[WeightRows],
        sequence_dimension: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        device = x.device.type
        dtype = autocast_dtype(x)
        if dtype is not None:
            x = x.to(dtype)
            parts = [WeightRows(weight.to(dtype), None if bias is None else bias.to(dtype)) for weight, bias in parts]
        self._parts = parts
        self._products: list[torch.Tensor] | None = None
        if torch.compiler.is_dynamo_compiling():
            assert sequence_dimension is not None, "compiled code needs no nodes for a whole sequence"
            flat = [each for part in parts for each in part]
            self.whole, *self._products = _Products.apply(x, sequence_dimension, reduce_dtype, *flat)  # type: ignore[no-untyped-call]
            return
        with torch.autocast(device, enabled=False):
            sequence = None
            if sequence_dimension is not None:
                count = sum(weight.requires_grad for weight, _ in parts)
                sequence = _Sequence(sequence_dimension, count)
            finished = _Finish.apply(x)  # type: ignore[no-untyped-call]
            self._tokens = [
                _Weight.apply(finished.detach(), *part, sequence)  # type: ignore[no-untyped-call]
                for part in parts
            ]
            self.whole = _Start.apply(finished, sequence, reduce_dtype)  # type: ignore[no-untyped-call]
            self._rows = self.whole.reshape(-1, x.shape[-1])

    def product(self, index: int) -> torch.Tensor:
        """Return the product ``(..., O)`` of the part ``index``; once for each part."""
        if self._products is not None:
            return self._products[index]
        weight, bias = self._parts[index]
        with torch.autocast(self._rows.device.type, enabled=False):
            product = functional.linear(self._rows, weight.detach(), None if bias is None else bias.detach())
            joined: torch.Tensor = _Join.apply(product, self._tokens[index])  # type: ignore[no-untyped-call]
            return joined.view(*self.whole.shape[:-1], joined.shape[-1])


class _Sequence:
    """The dimension of the sequence, which the tensor group divides.

    The nodes of ``count`` weights share the sequence that the first of them gathers; the last one frees it.
    """

    def __init__(self, dim: int, count: int) -> None:
        self.dim = dim
        self._count = self._left = count
        self._gathered: torch.Tensor | None = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence of the part ``x``, for one weight."""
        whole = all_gather(x, self.dim) if self._gathered is None else self._gathered
        self._left -= 1
        if self._left == 0:
            self._left = self._count
        self._gathered = None if self._left == self._count else whole
        return whole


class _Finish(torch.autograd.Function):
    """End of the collective of the input-gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return wait(gradients[0])


class _Start(torch.autograd.Function):
    """Start of the collective of the input-gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sequence: _Sequence | None, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.sequence, ctx.reduce_dtype = sequence, reduce_dtype
        return outside_of_graph(x if sequence is None else all_gather(x, sequence.dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Start the sum of all ranks' gradients, of which no other node reads the content before ``_Finish``."""
        (gradient,) = gradients
        summed = gradient.to(ctx.reduce_dtype or gradient.dtype)
        started = start_all_reduce(summed) if ctx.sequence is None else start_reduce_scatter(summed, ctx.sequence.dim)
        if summed.dtype != gradient.dtype:
            # Autograd would convert the sum, whose content comes later.
            started = wait(started).to(gradient.dtype)
        return started, None, None


class _Weight(torch.autograd.Function):
    """Gradients of weight and bias, without a part in the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sequence: _Sequence | None
    ) -> torch.Tensor:
        """Return a tensor without memory that has the shape of the product."""
        ctx.save_for_backward(x)
        ctx.sequence = sequence
        rows = x.numel() // x.shape[-1]
        if sequence is not None:
            rows *= size_of(None)
        return weight.new_zeros(()).expand(rows, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        weight_gradient = None
        if needs_weight:
            (x,) = ctx.saved_tensors
            if ctx.sequence is not None:
                x = ctx.sequence.gather(x)
            weight_gradient = gradient.t().mm(x.reshape(-1, x.shape[-1]))
        return None, weight_gradient, gradient.sum(0) if needs_bias else None, None


class _Join(torch.autograd.Function):
    """The product, whose gradient goes to both of its sources."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Return ``product``, in place: unlike a view of a custom function it may be changed in place later."""
        # A split backward may run the node once for each gradient: it computes nothing.
        ctx.computes_each_gradient_alone = True
        ctx.mark_dirty(product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        return gradient, gradient


class _Products(torch.autograd.Function):
    """All parts in compiled code: the whole sequence, and the product of each part."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, reduce_dtype: torch.dtype | None, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        """``parameters`` has the weight of each part and its bias or ``None``, in turn."""
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.dim, ctx.reduce_dtype, ctx.has_bias = dim, reduce_dtype, tuple(bias is not None for bias in biases)
        whole = all_gather(x, dim)
        products = [functional.linear(whole, *part) for part in zip(weights, biases, strict=True)]
        return whole, *products

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        # In the order of autograd: the node that was created last is the first.
        total = rows[-1].mm(weights[-1])
        for index in range(len(weights) - 2, -1, -1):
            total = total + rows[index + 1].mm(weights[index])
        summed = (total + rows[0]).view(gradients[0].shape).to(ctx.reduce_dtype or x.dtype)
        input_gradient = reduce_scatter(summed, ctx.dim).to(x.dtype)
        whole = all_gather(x, ctx.dim)
        whole = whole.reshape(-1, whole.shape[-1])
        of_parameters: list[torch.Tensor | None] = []
        for index, has_bias in enumerate(ctx.has_bias):
            gradient = rows[index + 1]
            of_parameters += [gradient.t().mm(whole), gradient.sum(0) if has_bias else None]
        return input_gradient, None, None, *of_parameters
