"""An optimizer that has to average gradients over replicas, and does or does not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.average import bucket_allreduce_gradients
from nxdpp.gradients.gradient_norm import clip_grad_norm
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.tensor.layers import ColumnParallelLinear
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks


class Averaging(torch.optim.SGD):
    """Averages gradients in its step, as a ZeRO-1 optimizer does."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parallel_state.get_data_parallel_size()
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        return super().step(closure)


def left_out_averages(own: dict[str, torch.Tensor]) -> None:
    """A step with the gradients of one replica is found; each remedy, and an optimizer that averages, is not."""
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=1)
    parameters = list(wrapped.local_parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    averaging = Zero1Optimizer(parameters, torch.optim.AdamW, lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for remedy in ("a last batch", "an average of the program", "an optimizer that averages"):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped.run_train(**own)
        other.step()
        if remedy == "a last batch":
            wrapped.run_train(**own)
        elif remedy == "an average of the program":
            bucket_allreduce_gradients([parameter.grad for parameter in parameters if parameter.grad is not None])
        (averaging if remedy == "an optimizer that averages" else optimizer).step()
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped.run_train(**own)
    with pytest.raises(RuntimeError, match=r"after a step of AdamW: .*no_sync.*Run the last batch of an accumulation"):
        optimizer.step()


def loop_of_tensor_layers(rank: int, kind: str) -> None:
    """Four steps of the loop of NxD's guide for tensor parallelism, which has no ``run_train``."""
    torch.manual_seed(rank if kind == "seeds" else 0)
    model: torch.nn.Module = torch.nn.Sequential(ColumnParallelLinear(4, 4), torch.nn.Linear(4, 2))
    if kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=parallel_state.get_data_parallel_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        of_rank = 0 if kind == "other batches later" and step == 0 else rank
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + of_rank))
        model(inputs).square().sum().backward()
        if kind == "average":
            bucket_allreduce_gradients([p.grad for p in model.parameters() if p.grad is not None])
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def steps_of_tensor_layers(rank: int) -> None:
    for kind in ("average", "DDP"):
        loop_of_tensor_layers(rank, kind)
    remedy = r"Call nxdpp\.parallel_layers\.grads\.bucket_allreduce_gradients\(.*before clipping"
    with pytest.raises(RuntimeError, match=rf"in \d of 4 parameters after step 1 of AdamW: .*not averaged\. {remedy}"):
        loop_of_tensor_layers(rank, "no average")
    with pytest.raises(RuntimeError, match=r"after step 2 of AdamW: .*not averaged"):
        loop_of_tensor_layers(rank, "other batches later")
    with pytest.raises(
        RuntimeError, match=r"other parameters than .* before the first step of AdamW\. Give torch\.manu"
    ):
        loop_of_tensor_layers(rank, "seeds")


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    steps_of_tensor_layers(rank)
    batch = padded_batch(4)
    own = {name: value.chunk(2)[rank] for name, value in batch.items()}
    model = make("llama", layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=1, use_zero1_optimizer=True)
    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    averaging = Averaging(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        wrapped.run_train(**own)
        elsewhere.step()
        averaging.step()
        train_in_one_process(whole, batch, 2)
        differences = gradient_differences(wrapped, whole)
        assert all(distance is not None and distance < 1e-5 for distance in differences.values()), differences
        for module in (wrapped, whole):
            module.zero_grad()
        whole.load_state_dict(model.state_dict())
    # One that leaves each replica its own gradients.
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=1, use_zero1_optimizer=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped.run_train(**own)
    with pytest.raises(RuntimeError, match=r"after step 1 of AdamW: .*set use_zero1_optimizer=False"):
        optimizer.step()
    # A warm-up that begins with a learning rate of 0.
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=1, use_zero1_optimizer=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    wrapped.run_train(**own)
    optimizer.step()
    warm_up.step()
    with pytest.raises(RuntimeError, match=r"after step 2 of AdamW: .*or take one that averages"):
        optimizer.step()
    left_out_averages(own)
    # The remedy.
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=1, use_zero1_optimizer=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped.run_train(**own)
    optimizer.step()


def test_an_optimizer_that_does_not_average_is_found_at_its_first_step() -> None:
    run_ranks(2, train)
