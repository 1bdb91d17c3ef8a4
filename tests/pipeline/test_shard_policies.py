"""Mixed precision and offload of shards, against torch's FSDP2 of the unwrapped model."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.shards.local_tensors import local_rows
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
POLICIES: dict[str, dict[str, Any]] = {
    "gradients add up in float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "the output is float32": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
}


def of_torch(policy: dict[str, Any]) -> Any:
    """The unwrapped model, each layer a unit. Only the whole has an output dtype: its head takes bfloat16."""
    mesh = parallel_state.get_device_mesh()["data"]
    torch.manual_seed(0)
    model: Any = llama(2)
    inner = MixedPrecisionPolicy(**{key: value for key, value in policy.items() if key != "output_dtype"})
    for layer in model.model.layers:
        torch_fully_shard(layer, mesh=mesh, mp_policy=inner)
    torch_fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the gradient of ``parameter``."""
    assert parameter.grad is not None
    return local_rows(parameter.grad)


def train(rank: int) -> dict[str, list[float]]:
    """For each policy the greatest difference of a gradient from torch's, after one and two steps."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    found: dict[str, list[float]] = {}
    for name, policy in POLICIES.items():
        theirs = of_torch(policy)
        torch.manual_seed(0)
        ours = NxDPPModel(llama(2), num_microbatches=MICROBATCHES)
        nxdpp.fully_shard(ours, mp_policy=MixedPrecisionPolicy(**policy))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (ours, theirs)]
        found[name] = []
        for step in range(2):
            ids = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(10 * rank + step))
            ours.run_train(input_ids=ids, labels=ids)
            for number, part in enumerate(ids.chunk(MICROBATCHES)):
                theirs.set_requires_gradient_sync(number == MICROBATCHES - 1)
                (theirs(input_ids=part, labels=part, use_cache=False).loss / MICROBATCHES).backward()
            gradients = {key: rows_of(each) for key, each in theirs.named_parameters()}
            own = {key: rows_of(each) for key, each in ours.local_named_parameters()}
            assert {each.dtype for each in own.values()} == {torch.float32}
            assert own.keys() == gradients.keys()
            found[name].append(max((own[key] - gradients[key]).abs().amax().item() for key in own))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return found


def refuse(rank: int) -> None:
    parallel_state.initialize_model_parallel(hang_timeout=60)
    torch.manual_seed(0)
    model = NxDPPModel(llama(2), num_microbatches=MICROBATCHES)
    names = [name for name, _ in model.local_named_parameters()]
    with pytest.raises(
        ValueError, match=r"^CPUOffloadPolicy\(\) pins memory for a CUDA device.* leave offload_policy out"
    ):
        nxdpp.fully_shard(model, offload_policy=CPUOffloadPolicy())
    with pytest.raises(ValueError, match=r"^reshard_after_forward=2 must be None, True or False"):
        nxdpp.fully_shard(model, reshard_after_forward=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^fully_shard takes a wrapped model, not a Linear"):
        nxdpp.fully_shard(torch.nn.Linear(2, 2))
    # Nothing was changed. Rows may stay on the host without pinned memory.
    nxdpp.fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(RuntimeError, match=r"^fully_shard was called for this model already"):
        nxdpp.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"stays torch\.float32 on cpu: convert and move"):
        model.double()
    assert [name for name, _ in model.local_named_parameters()] == names
    model.run_train(input_ids=torch.arange(24).view(4, 6), labels=torch.arange(24).view(4, 6))


@pytest.mark.cpu_only("an accelerator has pinned memory")
def test_what_cannot_be_honoured_is_refused() -> None:
    run_ranks(1, refuse)


class _ReadLayer(torch.nn.Linear):
    """A layer whose weight the model reads too."""


class _Penalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_ReadLayer(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.pow(2).mean() + 0.01 * self.layers[1].weight.pow(2).sum()}  # type: ignore[operator]


def read_outside(rank: int) -> dict[str, float]:
    """Return the differences of gradients from one process with the remedy that the refusal names."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    torch.manual_seed(0)
    whole, module = _Penalised(), _Penalised()
    module.load_state_dict(whole.state_dict())
    model = NxDPPModel(module, _ReadLayer, num_microbatches=2, output_loss_value_spec={"loss": True})
    nxdpp.fully_shard(model)
    rows = torch.arange(16.0).view(4, 4) / 16
    model.run_train(x=rows)
    for part in rows.chunk(2):
        (whole(part)["loss"] / 2).backward()
    gradients = {name: rows_of(each) for name, each in model.local_named_parameters()}
    replica = parallel_state.get_data_parallel_rank()
    expected = {name: each.grad.chunk(2)[replica] for name, each in whole.named_parameters() if each.grad is not None}
    return {name: (gradients[name] - expected[name]).abs().amax().item() for name in gradients}


def refuse_read_outside(rank: int) -> None:
    parallel_state.initialize_model_parallel(hang_timeout=60)
    torch.manual_seed(0)
    model = NxDPPModel(_Penalised(), _ReadLayer, num_microbatches=2, output_loss_value_spec={"loss": True})
    nxdpp.fully_shard(model, reshard_after_forward=True)
    model.run_train(x=torch.ones(4, 4))


def test_gradients_equal_those_of_torch_and_the_remedy_for_a_weight_that_is_read_outside() -> None:
    for found, differences in run_in_turn(2, train, read_outside):
        assert found == {name: [0.0, 0.0] for name in POLICIES}
        assert max(differences.values()) < 1e-6, differences


def test_a_weight_that_is_read_outside_of_its_layer() -> None:
    told = "forward reads layers.1.weight outside of its layer.*Call fully_shard without reshard_after_forward=True"
    with pytest.raises(AssertionError, match=told):
        run_ranks(2, refuse_read_outside)
