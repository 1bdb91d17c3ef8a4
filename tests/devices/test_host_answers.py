"""Answers of the host are those of the device, and follow from the step's inputs alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxdpp.devices.host_answers import HostAnswers, note_host_copy, note_inputs
from tests.support import fake_device
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fake_device.built()


def changed(mask: torch.Tensor) -> torch.Tensor:
    mask[0, 0] = 0
    return mask.all()


# A question, and whether the host waits for the device.
QUESTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "all": (lambda mask: mask.all(), False),
    "a part": (lambda mask: mask[:, -1].bool().logical_not().any(), False),
    "positions": (lambda mask: (torch.arange(3, device=mask.device) * mask).max() > 1, False),
    "constants": (lambda mask: (torch.ones(2, 3, device=mask.device).bool() & (mask > 0)).all(), False),
    "the same tensor": (lambda mask: (mask > 0).bool().contiguous().all(), False),
    "the same unknown tensor": (lambda mask: (mask.double() > 0).bool().contiguous().all(), True),
    "drawn like it": (lambda mask: torch.randint_like(mask, 0, 2).all(), True),
    "drawn of it": (lambda mask: torch.multinomial(mask.double(), 1).any(), True),
    "floats": (lambda mask: (mask.double().mean() * 3).bool(), True),
    "changed": (changed, True),
}


def asked(rank: int) -> dict[str, tuple[bool, bool, bool, bool]]:
    """The answer, that of the device, whether the host has waited, and whether its generator has moved."""
    fake_device.install()
    found: dict[str, Any] = {}
    for name, (question, _) in QUESTIONS.items():
        answers = []
        for answering in (True, False):
            host = torch.ones(2, 3, dtype=torch.int64)
            mask = host.to("fake")
            note_host_copy(mask, host)
            torch.manual_seed(3)
            before = torch.get_rng_state()
            with fake_device.host_waits() as waits:
                if answering:
                    with HostAnswers():
                        answers.append(bool(question(mask)))
                else:
                    answers.append(bool(question(mask)))
            if answering:
                seen = bool(waits), not torch.equal(before, torch.get_rng_state())
        found[name] = (*answers, *seen)
    return found


def test_answers_are_those_of_the_device_and_nothing_is_drawn_on_the_host() -> None:
    (found,) = run_ranks(1, asked)
    for name, (answer, of_device, waited, moved) in found.items():
        assert answer is of_device, name
        assert waited is QUESTIONS[name][1], name
        assert not moved, name


def asked_of_inputs(rank: int) -> list[int]:
    """The waits for questions about inputs on a device, in two steps of two microbatches."""
    fake_device.install()
    waited = []
    for _ in range(2):
        parts = [torch.ones(2, 3, dtype=torch.int64).to("fake") for _ in range(2)]
        note_inputs(parts)
        with fake_device.host_waits() as waits:
            for part in parts:
                with HostAnswers():
                    assert bool(part.all())
                    assert not bool((part[:, -1] == 0).any())
        waited.append(sum(waits.values()))
    return waited


def test_inputs_on_a_device_are_waited_for_once_a_step() -> None:
    assert run_ranks(1, asked_of_inputs) == [[1, 1]]
