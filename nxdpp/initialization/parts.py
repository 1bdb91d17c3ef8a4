"""Tensors of which a rank holds a part, with the whole tensor that they are a part of.

Initial weights come from the whole tensor, whatever the number of parts. The whole is made, and the part is taken::

    whole (n, H), a meta tensor ─▶ initial values of the whole ─▶ take ─▶ values of the part (n / 2, H)
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

_NAME = "_nxdpp_is_part_of"


@dataclass(frozen=True, eq=False)
class PartOf:
    """Part ``index`` of ``count`` equal ones of ``whole`` along ``dim``, of each of ``stride`` blocks.

    ``whole`` is on the meta device. ``padded`` is the number of elements along ``dim`` with the zeros behind the whole;
    0 without padding, and with blocks.
    """

    whole: torch.Tensor
    dim: int
    index: int
    count: int
    stride: int = 1
    padded: int = 0

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of the part of ``values``, which has the shape of ``whole``."""
        if self.padded:
            missing = [0, 0] * (values.dim() - 1 - self.dim) + [0, self.padded - values.shape[self.dim]]
            values = functional.pad(values.detach(), missing)
        chunks = torch.chunk(values.detach(), self.count * self.stride, self.dim)
        part = torch.cat(chunks[self.index :: self.count], self.dim)
        return part.contiguous()

    def __deepcopy__(self, memo: object) -> "PartOf":
        # The whole tensor tells a constructor's record which operations made it.
        return self


def mark_part(tensor: torch.Tensor, part: PartOf) -> None:
    """Mark ``tensor`` as ``part``."""
    setattr(tensor, _NAME, part)


def part_of(tensor: torch.Tensor) -> PartOf | None:
    """The whole of which ``tensor`` is a part; ``None`` for a whole tensor."""
    part: PartOf | None = getattr(tensor, _NAME, None)
    return part


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a part on the meta device; ``tensor`` itself if it is none."""
    part = part_of(tensor)
    return tensor if part is None else part.whole


def own_part(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``values`` that ``tensor`` is of its whole; ``values`` themselves for a whole tensor."""
    part = part_of(tensor)
    return values if part is None else part.take(values)
