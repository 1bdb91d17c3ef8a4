"""Comparison of a tensor-parallel model with the whole model in one process.

Both run in float64 throughout, so that a difference shows an error and no rounding. Models convert to float32 in
places, such as norms and softmax. These conversions become conversions to float64::

    model of float64 ─▶ norm: x.to(torch.float32) ─▶ product in float64     rounding of 1e-7 in each norm
    under Float64    ─▶ norm: x.to(torch.float64) ─▶ product in float64     rounding of 1e-16
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nxdpp.ground.torch_names import pytree
from nxdpp.ground.transformers_names import EXPERTS
from nxdpp.initialization.parts import own_part
from nxdpp.tensor.collectives import all_reduce, size_of
from nxdpp.tensor.models.compared_types import note_compared
from nxdpp.tensor.models.parallelize import checked_plan, parallelize
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients

EQUAL = 1e-9
"""Greatest difference of equal computations in float64, as a share of the greatest value of a gradient."""


def check_tensor_parallel(
    model: nn.Module, inputs: Mapping[str, Any], plan: Mapping[str, str] | None = None, *, pad_heads: bool = False
) -> tuple[float, str]:
    """Compare ``model`` divided by ``plan`` with ``model`` in one process; collective over the tensor group.

    Both are copies in float64 and in evaluation mode: loss and gradients differ by rounding of 1e-14, or by an error of
    the plan. Give a small model of the class, with each kind of layer: its configuration with few layers and a small
    hidden size. After it, ``tensor_parallelize`` takes this class and plan without a warning or a refusal. ``model``
    is not changed.

    Args:
        model: not divided, with the same values on all ranks of the group; of any size that fits four times.
        inputs: keyword arguments of its forward, the same on all ranks; tensors may be inside dicts and lists. With
            ``labels`` the loss is compared; without a loss in the output, the mean square of each floating tensor.
        plan: as for ``tensor_parallelize``; by default the plan of the model's type.
        pad_heads: as for ``tensor_parallelize``.

    Returns:
        The greatest difference on this rank, as a share of the greatest value of the gradient, and its parameter.

    Raises:
        ValueError: for a difference above 1e-9, with the parameter, and for each plan that ``tensor_parallelize``
            refuses.
        RuntimeError: before ``initialize_model_parallel``.
    """
    chosen = checked_plan(model, plan)
    whole, ours = (to_float64(copy.deepcopy(model)).eval() for _ in range(2))
    parallelize(ours, chosen, parallel_loss=plan is None and inputs.get("labels") is not None, pad_heads=pad_heads)
    found = difference(ours, whole, inputs)
    greatest = all_reduce(torch.tensor([found[0]], dtype=torch.float64), operation="max").item()
    if not greatest < EQUAL:
        where = f"at {found[1]} on this rank" if not found[0] < EQUAL else "on another rank of the group"
        raise ValueError(
            f"{type(model).__name__} on {size_of(None)} tensor-parallel ranks differs from one process by "
            f"{greatest:.1e} of the greatest value, {where}: correct the plan. Norms and other parameters that see the "
            f"heads or features of one rank take the style replicated_with_grad_allreduce. Build the model from one "
            f"seed on all ranks."
        )
    note_compared(type(model), chosen)
    return found


def difference(ours: nn.Module, whole: nn.Module, inputs: Mapping[str, Any]) -> tuple[float, str]:
    """Greatest difference of loss and gradients on this rank, and the name of its parameter.

    A model of float64 runs in float64 throughout. Each difference is a share of the greatest value in ``whole``, for a
    gradient of a thousandth of the greatest one of all gradients at least. Infinite if a difference is not finite.

    Raises ``ValueError`` where ``whole`` has no gradient, since nothing would be compared.
    """
    losses = [_train(model, inputs) for model in (ours, whole)]
    allreduce_sequence_parallel_gradients(ours.parameters())
    worst = (_relative(losses[0], losses[1], 1e-6), "loss")
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    least = max((_greatest(gradient) for gradient in gradients.values()), default=0.0) / 1000
    if not least:
        raise ValueError("all gradients of the model in one process are zero or missing: nothing is compared")
    for name, parameter in ours.named_parameters():
        theirs = gradients.get(name, torch.zeros(()).expand(whole.get_parameter(name).shape))
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # The scale comes from the whole gradient.
        scale = max(least, _greatest(theirs))
        worst = max(worst, (_relative(mine, own_part(theirs, parameter), scale), name))
    return worst


def _train(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    is_wide = next(model.parameters()).dtype == torch.float64
    model.zero_grad()
    with Float64() if is_wide else nullcontext():
        given = pytree.tree_map(_as_float64, dict(inputs)) if is_wide else inputs
        loss = _loss(model(**given))
        loss.backward()
    return loss.detach()


def _loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, torch.Tensor):
        return loss
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    squares = [
        value.square().mean() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    if not squares:
        raise ValueError("the output has no loss and no floating tensor to compare: give labels")
    return torch.stack(squares).sum()


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _relative(ours: torch.Tensor, theirs: torch.Tensor, least_scale: float) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    distance = _greatest(ours.double() - theirs.double())
    scale = max(_greatest(theirs), least_scale)
    return distance / scale if math.isfinite(distance) and math.isfinite(scale) else math.inf


def _greatest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


class Float64(TorchFunctionMode):
    """Context in which torch's functions take ``torch.float64`` for ``torch.float32``, and ``double`` for ``float``.

    Build a model outside of it: its initial weights would be different inside.
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
        if EXPERTS.held_by(config):
            # torch's grouped products take no float64.
            EXPERTS.set(config, "eager")
    return nn.Module.to(model, dtype=torch.float64)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
