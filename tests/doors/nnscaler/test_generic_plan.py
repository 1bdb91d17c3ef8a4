"""Modules around transformers' models with the policy ``tp``: the numbers of one process, and half of the memory."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.generic_plan import compare
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.own_folders import parallelize
from tests.support import models
from tests.support.run_ranks import run_ranks


class Wrapper(nn.Module):
    """A transformers model inside an end-to-end module, with a layer of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = models.make(name)
        self.mix = nn.Linear(models.VOCABULARY, 6)

    def forward(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self.model(**sample)
        return output.loss + self.mix(output.logits).square().mean()  # type: ignore[no-any-return]


class HandMade(nn.Module):
    """Uses the weight of a linear layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight.t() + self.linear.bias


def _compared(rank: int) -> None:
    sample = models.padded_batch(2)
    for name in ("llama", "gpt2", "bert"):
        torch.manual_seed(0)
        whole = Wrapper(name)
        model = parallelize(whole, {"sample": sample}, "tp", ComputeConfig(2, 2, use_end2end=True))
        assert isinstance(model, ParallelModule)
        (loss,), expected = model.train_step([sample]), whole(sample)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
        sizes = [sum(each.numel() for each in part.parameters()) for part in (model, whole)]
        # The vocabulary of 61 rows and positions stay whole.
        assert sizes[0] < 0.8 * sizes[1], name
        for own, parameter in model.named_parameters():
            gradient = whole.get_parameter(own).grad
            if gradient is not None and gradient.shape == parameter.shape:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5, msg=own)
    # Outputs that are read have the whole vocabulary.
    llama: Any = models.make("llama")
    divided: Any = parallelize(llama, sample, "tp", ComputeConfig(2, 2))
    torch.testing.assert_close(divided(**sample).logits, llama(**sample).logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"HandMade on 2 .* differs from one process.*Use dp with plan_ngpus=1"):
        compare(HandMade(), {"x": torch.rand(2, 4)}, {"linear": "colwise_gather_output"})
    parallel_state.destroy_model_parallel()


def test_plans_equal_one_process() -> None:
    run_ranks(2, _compared)
