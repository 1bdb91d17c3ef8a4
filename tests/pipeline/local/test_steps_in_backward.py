"""Optimizers that step in a hook of a parameter."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.pipeline.local.changes import ChangeRecord
from nxdpp.pipeline.local.refused_steps import refuse_wrong_steps


def step_in_backward(model: nn.Linear) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)
    model(torch.ones(1, 2)).sum().backward()
    return optimizer


def test_the_step_is_refused_with_its_line_and_passes_after_the_backward() -> None:
    record, model = ChangeRecord(), nn.Linear(2, 2, bias=False)
    record.follow(model, [])
    refuse_wrong_steps()
    before = model.weight.detach().clone()
    place = r"SGD, steps in the backward .*\n  at .*test_steps_in_backward.py:\d+, in step"
    with pytest.raises(RuntimeError, match=rf"{place}[\s\S]*num_microbatches=1 too"):
        step_in_backward(model)
    assert torch.equal(model.weight, before)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.weight, before)


def test_other_models_step_in_their_backwards() -> None:
    refuse_wrong_steps()
    model = nn.Linear(2, 2, bias=False)
    step_in_backward(model)
    assert model.weight.grad is None
