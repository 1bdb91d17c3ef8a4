"""Ranks on the fake accelerator have the tensors of a test on the device, with the values of the CPU."""

import pytest
import torch
from torch import nn

from tests.support import fake_device
from tests.support.run_ranks import DEVICE, run_ranks

REASON = fake_device.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]

OF_MODULE = [torch.arange(3.0)]


def made(rank: int, given: nn.Linear) -> tuple[dict[str, torch.Tensor], set[str], torch.device]:
    torch.manual_seed(3)
    tensors = {
        "parameter": nn.Embedding(20, 3).weight,
        "numbers": torch.randn(4),
        "in place": torch.empty(5).uniform_(),
        "of a generator": torch.randperm(6, generator=torch.Generator().manual_seed(1)),
        "of the module": OF_MODULE[0],
        "given": given.weight,
    }
    with torch.device("meta"):
        assert torch.empty(1).is_meta
    assert torch.empty(1, device="cpu").is_cpu
    return tensors, {tensor.device.type for tensor in tensors.values()}, tensors["numbers"].device


def test_tensors_are_on_the_device_with_the_values_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.built()
    given = nn.Linear(2, 2)
    expected, types, _ = made(0, given)
    assert types == {"cpu"}
    monkeypatch.setenv(DEVICE, "fake")
    for found, types, device in run_ranks(2, made, given):
        assert types == {"fake"}
        assert device == torch.device("cpu"), "a device of a result is the CPU for the caller"
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
