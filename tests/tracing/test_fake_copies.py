"""Fake copies have shapes and dtypes, and no memory."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from nxdpp.tracing.fake_copies import FakeCopies


class _Module(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, device=device, dtype=torch.bfloat16)
        self.register_buffer("table", torch.ones(4, device=device))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table + self.plain  # type: ignore[no-any-return]


def test_a_module_runs_without_its_weights() -> None:
    for device in ("cpu", "meta"):
        module = _Module(device)
        with FakeTensorMode() as mode:
            copies = FakeCopies()
            copied = copies.module(module)
            assert copies.module(module) is copied
            result = copied(torch.empty(2, 3, dtype=torch.bfloat16))
            assert isinstance(result, FakeTensor)
            assert result.fake_mode is mode
            assert result.shape == (2, 4)
            assert result.dtype == torch.float32
        assert module.linear.weight.device.type == device
        assert not isinstance(module.plain, FakeTensor)


def test_a_tensor_has_one_copy() -> None:
    weight = nn.Parameter(torch.ones(2, 3).t(), requires_grad=False)
    with FakeTensorMode():
        copies = FakeCopies()
        copied = copies.tensor(weight)
        assert copies.tensor(weight) is copied
        assert isinstance(copied, nn.Parameter)
        assert not copied.requires_grad
        assert copied.shape == (3, 2)
        assert copied.stride() == weight.stride()
