"""Gradients of half parameters that accumulate and are averaged in float32 (``use_fp32_grad_acc``), by the trainer."""

from typing import Any

import pytest
import torch
from torch import nn

import nxdpp
from nxdpp import parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.trainer import initialize_parallel_model, initialize_parallel_optimizer
from tests.support.models import make, microbatches, padded_batch, reference
from tests.support.run_ranks import run_ranks

STEPS, MICROBATCHES = 2, 4
HALF = torch.bfloat16
RATE = 0.5

needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 has grad_dtype")


def model_in_half(name: str) -> Any:
    return make(name).to(HALF)


class OneProcess:
    """The same training of two replicas: float32 masters, and sums of gradients in float32."""

    def __init__(self, name: str) -> None:
        self.model = reference(model_in_half(name))
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.model.named_parameters()}
        self.optimizer = torch.optim.SGD(self.masters.values(), RATE)
        if "lm_head.weight" not in self.masters:
            # Autograd would add the gradients of a tied weight in half precision.
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        for part in microbatches(batch, 2 * MICROBATCHES):
            (self.model(**part).loss / MICROBATCHES).backward()
            for name, parameter in self.model.named_parameters():
                total = self.master(name).grad
                assert total is not None
                total += parameter.grad.float() / 2
                parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master(name))

    def master(self, name: str) -> nn.Parameter:
        return self.masters[name if name in self.masters else "model.embed_tokens.weight"]


def train(config: dict[str, Any], schedule: str, name: str = "llama") -> tuple[float, set[torch.dtype]]:
    """Return the largest distance of a master copy from one process, and the dtypes of gradients."""
    pipeline = {"num_microbatches": MICROBATCHES, "schedule": schedule}
    config = {**config, "pipeline_config": {**pipeline, "use_zero1_optimizer": True}}
    model = initialize_parallel_model(config, model_in_half, False, name)
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, model.local_named_parameters(), lr=RATE)
    whole = OneProcess(name)
    replica = parallel_state.get_data_parallel_rank()
    dtypes = set()
    # One step of a tied weight: its sum has another order, and a rounded parameter would change the next step.
    for step in range(1 if name.startswith("tied") else STEPS):
        batch = padded_batch(2 * MICROBATCHES, length=6, seed=step)
        model.run_train(**{name: value.chunk(2)[replica] for name, value in batch.items()})
        dtypes |= {parameter.grad.dtype for parameter in model.local_parameters() if parameter.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        whole.step(batch)
    distances = [
        (whole.master(str(shard.name)).reshape(-1)[shard.start : shard.stop] - values).abs().max().item()
        for shard, values, _ in optimizer.shards()
    ]
    return max(distances), dtypes


def train_all(rank: int) -> dict[str, tuple[float, set[torch.dtype]]]:
    config = nxdpp.neuronx_distributed_config(1, 2, optimizer_config={"zero_one_enabled": True, "grad_clipping": False})
    half = {**config, "mixed_precision_config": {**config["mixed_precision_config"], "use_fp32_grad_acc": False}}
    return {
        "zb-v": train(config, "zb-v"),
        "tied": train(config, "1f1b", "tied_llama"),
        "half": train(half, "1f1b"),
    }


@needs_grad_dtype
def test_half_parameters_train_with_float32_gradients_by_default() -> None:
    for result in run_ranks(4, train_all, timeout=200):
        for case in ("zb-v", "tied"):
            distance, dtypes = result[case]
            assert dtypes == {torch.float32}
            assert distance < 1e-6
        distance, dtypes = result["half"]
        assert dtypes == {HALF}
        # The test can tell the two apart.
        assert distance > 1e-4


@pytest.fixture
def alone() -> Any:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@needs_grad_dtype
def test_gradients_in_half_precision_are_refused(alone: None) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=HALF))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"make the optimizer before the first backward, or set \.grad to None"):
        NeuronZero1Optimizer([parameter], torch.optim.AdamW, use_grad_acc_hook=True)
    # The remedy, and a frozen parameter that is trained later.
    parameter.grad = None
    frozen = nn.Parameter(torch.zeros(3, dtype=HALF), requires_grad=False)
    optimizer = NeuronZero1Optimizer([parameter, frozen], torch.optim.AdamW, use_grad_acc_hook=True, lr=1.0)
    frozen.requires_grad_(True)
    (parameter * frozen + frozen).sum().backward()
    assert frozen.grad is not None
    assert frozen.grad.dtype == torch.float32
    optimizer.step()
    assert frozen.any()
