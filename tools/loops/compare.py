"""Numbers of one process compared with the numbers of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tools.loops.models import part_like

Numbers = Mapping[str, torch.Tensor | None]

TOLERANCE = 1e-8
"""Of float64, as a share of the greatest value, or of 1. Tied weights, replicas and norms sum in a different order."""

COARSE = {"Muon": 1e-2}
"""Muon computes in bfloat16, in which a different order of a sum may be a different number."""


@dataclass(frozen=True)
class Event:
    """Numbers of a training in one process.

    Attributes:
        doing: the action that was running.
        what: kind of the numbers.
    """

    doing: str
    what: str
    numbers: Numbers


def difference(
    event: Event, numbers: Numbers, wholes: Mapping[str, Any], tolerance: float, is_whole: bool = False
) -> str:
    """Say how ``numbers`` of a rank differ from those of ``event``; return "" if they do not.

    ``wholes`` has the parameters that ``numbers`` belong to, where a rank may have a part of them. With ``is_whole``
    each name of one process is there. A gradient that is missing equals one of zeros.
    """
    if missing := sorted({*event.numbers} - {*numbers}) if is_whole else []:
        return f"{event.what} without {', '.join(missing)}"
    for name, value in numbers.items():
        if name not in event.numbers:
            return f"{event.what} of {name}, which one process does not have"
        expected = event.numbers[name]
        if value is not None and value.is_meta:
            return f"{event.what} of {name} on the meta device"
        if expected is not None:
            expected = part_like(expected, wholes.get(name, expected))
        found = _difference(value, expected, tolerance)
        if found:
            return f"{event.what} of {name}: {found}"
    return ""


def _difference(value: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> str:
    if value is None or expected is None:
        other = value if expected is None else expected
        if other is None or not other.count_nonzero():
            return ""
        return (
            f"{'none' if value is None else 'one'} on the rank, {'none' if expected is None else 'one'} in one process"
        )
    if value.shape != expected.shape:
        return f"shape {tuple(value.shape)} for {tuple(expected.shape)}"
    if not value.numel():
        return ""
    # Equal infinities and NaNs are equal.
    value, expected = value.detach().cpu(), expected.cpu()
    distance = (value.double() - expected.double()).abs()
    if torch.equal(value.double().isfinite(), expected.isfinite()):
        distance = distance.nan_to_num(0.0, 0.0)
    else:
        return "not finite in one of them"
    greatest = expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    if distance.max().item() > tolerance * max(1.0, greatest):
        return f"{value.flatten()[distance.argmax()].item():.9g} for {expected.flatten()[distance.argmax()].item():.9g}"
    return ""
