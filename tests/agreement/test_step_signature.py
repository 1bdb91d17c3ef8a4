"""Signatures of steps with samples of several shapes."""

from collections.abc import Sequence
from typing import Any

import torch

from nxdpp.agreement.step_signature import StepSignature, forms_of, signature_differences


def samples(lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [{"x": torch.ones(2, length), "scale": 0.5} for length in lengths]


def test_forms_are_numbered_in_the_order_of_samples() -> None:
    first, mixed = (forms_of(samples(lengths)) for lengths in ((3, 3), (3, 5, 3, 2, 5)))

    assert (first.numbers, first.others) == ((), ())
    assert mixed.first == first.first
    assert mixed.numbers == (0, 1, 0, 2, 1)
    assert [shapes[0][1] for shapes in mixed.others] == [(2, 5), (2, 2)]


def test_a_difference_of_forms_is_named() -> None:
    ours, theirs = (
        StepSignature(forms.first, (False, torch.float32), True, forms.numbers, forms.others)
        for forms in (forms_of(samples(lengths)) for lengths in ((3, 5), (3, 3)))
    )
    ((there, here),) = signature_differences(theirs, ours)

    assert there == "equal shapes in all samples"
    assert here == "samples of other shapes (x (2, 5) torch.float32) in the order (0, 1)"
