"""Numbers of a training on one rank, whole where they are sharded, and how far two trainings lie apart."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Numbers = Mapping[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` with the rows of all replicas; collective over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of this rank's part of a wrapped ``model``, and their gradients, each whole."""
    numbers = {}
    for name, parameter in model.local_named_parameters():
        numbers[name] = whole(parameter.detach())
        if parameter.grad is not None:
            numbers[f"gradient of {name}"] = whole(parameter.grad)
    return numbers


def distance(ours: Numbers, theirs: Numbers, floor: float) -> tuple[float, str]:
    """The greatest difference, as a share of the greatest value of its tensor or of ``floor``, and its name."""
    if ours.keys() != theirs.keys():
        return math.inf, ", ".join(sorted(ours.keys() ^ theirs.keys()))
    return max((_share(ours[name], theirs[name], floor), name) for name in theirs)


def _share(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    found = (ours.double() - theirs.double()).abs().max().item() / max(theirs.abs().max().item(), floor)
    return found if math.isfinite(found) else math.inf
