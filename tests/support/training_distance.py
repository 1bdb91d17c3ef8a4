"""How far a model that is trained in stages is from the same model trained whole: loss, gradients and buffers."""

import math
from collections import Counter
from typing import Any

import torch

from nxdpp.pipeline.microbatch import split_inputs
from tests.support.in_process import InProcessPipeline

TIED_ROUNDING = 1e-6


def distance(pipeline: InProcessPipeline, model: Any, whole: Any, batch: dict[str, torch.Tensor], parts: int) -> float:
    """0 where every number is equal, otherwise the greatest difference; infinite where one is not a number.

    ``pipeline`` runs the modules of ``model``; ``whole`` is its unwrapped copy. Both accumulate ``parts``
    microbatches from empty gradients; where gradients are off, losses and buffers alone are compared. Raises
    ``RuntimeError`` where ``whole`` has no gradient at all, and so nothing is compared.
    """
    backward = torch.is_grad_enabled()
    model.zero_grad()
    whole.zero_grad()
    ours = pipeline.train(batch, parts, backward)
    theirs = []
    for part in split_inputs(batch, parts):
        loss = whole(**part).loss
        if backward:
            (loss / parts).backward()
        theirs.append(loss.detach())
    losses = [relative(a, b, 1e-6) for a, b in zip(ours, theirs, strict=True)]
    buffers = [relative(a, b, 1e-6) for a, b in zip(model.buffers(), whole.buffers(), strict=True)]
    return max(*losses, *buffers, *(gradient_distances(model, whole) if backward else []))


def gradient_distances(model: Any, whole: Any) -> list[float]:
    """For each parameter how much its gradient differs, as a share of the greatest value of that of ``whole``.

    A gradient that is not there is one of zeros. A gradient that is small beside the others', below a thousandth of
    the greatest, is measured by that: an attention's key bias has none but for rounding. A tied weight's, a sum in
    another order, may differ by ``TIED_ROUNDING``.
    """
    names = Counter(id(parameter) for _, parameter in whole.named_parameters(remove_duplicate=False))
    greatest = max((_greatest(parameter.grad) for parameter in whole.parameters()), default=0.0)
    if not greatest:
        raise RuntimeError("the unwrapped model has no gradient that is not zero: nothing is compared.")
    distances = []
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        a = torch.zeros_like(ours) if ours.grad is None else ours.grad
        b = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        difference = relative(a, b, greatest / 1000)
        is_tied = names[id(theirs)] > 1
        distances.append(0.0 if is_tied and difference < TIED_ROUNDING else difference)
    return distances


def relative(ours: torch.Tensor, theirs: torch.Tensor, least_scale: float) -> float:
    """The greatest difference, as a share of the greatest value of ``theirs``, which counts as ``least_scale`` at
    least. Infinite where a difference is not a finite number, or the shapes differ."""
    if torch.equal(ours, theirs):
        return 0.0
    if ours.shape != theirs.shape:
        return math.inf
    difference = (ours.double() - theirs.double()).abs().max().item()
    scale = max(_greatest(theirs), least_scale)
    return difference / scale if math.isfinite(difference) and math.isfinite(scale) else math.inf


def _greatest(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.abs().max().item()
