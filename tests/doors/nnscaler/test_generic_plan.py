"""Plan of any module, compared with one process over two ranks."""

from typing import Any

import torch
from torch import nn

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.doors.nnscaler.generic_plan import compare, plan_for
from nxdpp.nnscaler import ComputeConfig, ParallelModule
from tests.doors.nnscaler.modules import Blocks, EndToEnd, Wrapped, sample_of
from tests.doors.nnscaler.own_folders import parallelize
from tests.support import models
from tests.support.run_ranks import run_ranks


class Wrapper(nn.Module):
    """A transformers model inside an end-to-end module, with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.make("llama")
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


def _outputs() -> list[float]:
    """Differences of a transformers model's outputs, with its own plan."""
    batch, found = models.padded_batch(2), []
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for vocabulary in (64, models.VOCABULARY):
        whole = models.make("llama", vocab_size=vocabulary)
        model = parallelize(whole, batch, "tp", ComputeConfig(2, 2))
        assert isinstance(model, ParallelModule)
        for given in (batch, inputs):
            ours, theirs = model(**given), whole(**given)
            assert ours.logits.shape == theirs.logits.shape
            found.append((ours.logits - theirs.logits).abs().max().item())
            if given is batch:
                found.append((ours.loss - theirs.loss).abs().item())
    return found


def _compared(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for module, args in (
        (Blocks(), sample_of(Blocks())),
        (EndToEnd().requires_grad_(False), sample_of(EndToEnd())),
        (Wrapper(), {"sample": models.padded_batch(2)}),
    ):
        plan = plan_for(module, 2)
        assert plan is not None
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            compare(module, args, plan)
        assert all(value.equal(before[name]) for name, value in module.state_dict().items())
        whole = sum(parameter.numel() for parameter in module.parameters())
        tensor_parallelize(module, plan)
        found[type(module).__name__] = sum(parameter.numel() for parameter in module.parameters()) / whole
    for name in ("gpt2", "bert", "roberta", "electra", "t5"):
        wrapped = Wrapped(name)
        plan = plan_for(wrapped, 2)
        assert plan
        compare(wrapped, {"sample": wrapped.sample()}, plan)
    try:
        compare(HandMade(), {"x": torch.rand(2, 4)}, {"linear": "colwise_gather_output"})
    except ValueError as error:
        found["refusal"] = str(error)
    parallel_state.destroy_model_parallel()
    found["outputs"] = _outputs()
    return found


def test_plans_equal_one_process() -> None:
    for found in run_ranks(2, _compared):
        assert found["EndToEnd"] == 0.5
        assert found["Blocks"] == 0.5
        assert 0.5 <= found["Wrapper"] < 0.6  # the vocabulary of 61 rows stays whole
        assert "HandMade on 2 tensor-parallel ranks differs from one process" in found["refusal"]
        assert "Use dp with plan_ngpus=1, or a policy function that gives a plan" in found["refusal"]
        assert max(found["outputs"]) < 1e-5
