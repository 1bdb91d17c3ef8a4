"""Distance between a model trained in stages and the same model trained whole: losses, gradients and buffers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdpp.pipeline.microbatches.rows import split_inputs
from tests.support.in_process import InProcessPipeline

TIED_ROUNDING = 1e-6
_SEED = 7


def distance(
    pipeline: InProcessPipeline,
    model: Any,
    whole: Any,
    batch: dict[str, torch.Tensor],
    parts: int,
    microbatches: Sequence[Mapping[str, torch.Tensor]] | None = None,
) -> float:
    """Greatest relative difference: 0 if all numbers are equal, infinite if one is not finite.

    ``pipeline`` runs the modules of ``model``; ``whole`` is its unwrapped copy. Both accumulate ``parts`` microbatches
    from empty gradients. Those of ``whole`` are ``microbatches``, by default from ``split_inputs``. With gradients
    disabled, only losses and buffers are compared. Raises ``RuntimeError`` if ``whole`` has no gradient, because
    nothing would be compared.

    Both draw the same random numbers where one module alone draws some: the loss, for each microbatch in turn.
    """
    backward = torch.is_grad_enabled()
    model.zero_grad()
    whole.zero_grad()
    torch.manual_seed(_SEED)
    ours = pipeline.train(batch, parts, backward)
    torch.manual_seed(_SEED)
    theirs = []
    for part in split_inputs(batch, parts) if microbatches is None else microbatches:
        loss = loss_of(whole(**part))
        if backward:
            (loss / parts).backward()
        theirs.append(loss.detach())
    losses = [relative(a, b, 1e-6) for a, b in zip(ours, theirs, strict=True)]
    # A forward may register buffers of its own, to keep what it computed.
    theirs_by_name = dict(whole.named_buffers())
    buffers = [relative(buffer, theirs_by_name[name], 1e-6) for name, buffer in model.named_buffers()]
    return max(*losses, *buffers, *(gradient_distances(model, whole) if backward else []))


def loss_of(output: Any) -> Any:
    """The loss in ``output``: a tensor is the loss itself."""
    return output if isinstance(output, torch.Tensor) else output.loss


def gradient_distances(model: Any, whole: Any) -> list[float]:
    """Difference of each parameter's gradient, as a share of the greatest value of the gradient in ``whole``.

    A missing gradient counts as zeros. The share is of at least a thousandth of the greatest gradient of all: the
    gradient of an attention's key bias is zero but for rounding. The gradient of a tied weight is a sum in another
    order and may differ by ``TIED_ROUNDING``.
    """
    names = Counter(id(parameter) for _, parameter in whole.named_parameters(remove_duplicate=False))
    greatest = max((_greatest(parameter.grad) for parameter in whole.parameters()), default=0.0)
    if not greatest:
        raise RuntimeError("all gradients of the unwrapped model are zero or missing: nothing is compared.")
    distances = []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        a = torch.zeros_like(ours) if ours.grad is None else ours.grad
        b = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        difference = relative(a, b, greatest / 1000)
        is_tied = names[id(theirs)] > 1
        distances.append(0.0 if is_tied and difference < TIED_ROUNDING else difference)
    return distances


def relative(ours: torch.Tensor, theirs: torch.Tensor, least_scale: float) -> float:
    """Greatest difference, as a share of the greatest value of ``theirs`` or of ``least_scale``, whichever is more.

    Infinite for different shapes and for a difference that is not finite.
    """
    if torch.equal(ours, theirs):
        return 0.0
    if ours.shape != theirs.shape:
        return math.inf
    difference = (ours.double() - theirs.double()).abs().max().item()
    scale = max(_greatest(theirs), least_scale)
    return difference / scale if math.isfinite(difference) and math.isfinite(scale) else math.inf


def _greatest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.abs().max().item()
