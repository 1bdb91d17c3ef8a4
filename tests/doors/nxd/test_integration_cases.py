"""Cases of NeuronX Distributed's integration tests, with their calls, on gloo: names and dtypes of ZeRO-1.

tests/tensor has those of layers and attention, tests/gradients those of norms.
"""

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import parallel_layers
from nxdpp.optimizer import NeuronZero1Optimizer
from nxdpp.parallel_layers import layers, mappings, parallel_state
from tests.support.run_ranks import run_ranks


def test_the_package_has_the_names_of_nxd() -> None:
    names = {
        "ColumnParallelLinear RowParallelLinear ParallelEmbedding": layers,
        "clip_grad_norm": parallel_layers.grads,
        "load save": parallel_layers.checkpointing,
        "parallel_cross_entropy": parallel_layers.loss_functions,
        "copy_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region": mappings,
        "reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region": mappings,
        "initialize_model_parallel": parallel_state,
        "get_xla_rng_tracker model_parallel_xla_manual_seed": parallel_layers.random,
        "copy_tensor_model_parallel_attributes set_tensor_model_parallel_attributes": parallel_layers.utils,
        "split_tensor_along_last_dim": parallel_layers.utils,
    }
    for some, module in names.items():
        for name in some.split():
            assert getattr(parallel_layers, name) is getattr(module, name)
            assert name in dir(parallel_layers)
    assert set(dir(parallel_layers)) >= {"layer_norm", "pad", "utils"}


def _zero1(model_dtype: torch.dtype, optimizer_dtype: torch.dtype, max_norm: float | None) -> None:
    """Three steps of AdamW, and the same with whole copies on each replica."""
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    torch.manual_seed(110 + 10 * place[0] + place[1])
    values = [torch.randn(8, 8).to(model_dtype) for _ in range(6)]
    ours, theirs = ([nn.Parameter(each.clone()) for each in values] for _ in range(2))
    for parameter in ours:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # NxD's attribute
    optimizer = NeuronZero1Optimizer(
        ours,
        optimizer_class=torch.optim.AdamW,
        optimizer_dtype=optimizer_dtype,
        grad_clipping=max_norm is not None,
        max_norm=max_norm,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_replica_groups(),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
        lr=1e-2,
    )
    copies = [nn.Parameter(each.detach().to(optimizer_dtype).clone()) for each in theirs]
    base = torch.optim.AdamW(copies, lr=1e-2)
    torch.manual_seed(1234 + parallel_state.get_data_parallel_rank())
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = (torch.randn(8, 8) / 10).to(model_dtype)
            other.grad = one.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        _whole_step(theirs, copies, base, max_norm)
        tolerance = 1e-6 if model_dtype is torch.float32 else 2e-3
        norms = [torch.stack([each.detach().double().norm() for each in those]).norm() for those in (ours, theirs)]
        torch.testing.assert_close(*norms, rtol=tolerance, atol=tolerance)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), saved, rtol=0, atol=0)


def _whole_step(
    parameters: list[nn.Parameter], copies: list[nn.Parameter], base: torch.optim.Optimizer, max_norm: float | None
) -> None:
    for parameter, copied in zip(parameters, copies, strict=True):
        assert parameter.grad is not None
        mean = parameter.grad.float()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        mean /= parallel_state.get_data_parallel_size()
        copied.grad = mean.to(parameter.dtype).to(copied.dtype)
    if max_norm is not None:
        gradients = [copied.grad for copied in copies if copied.grad is not None]
        square = torch.stack([each.float().square().sum() for each in gradients]).sum()
        dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
        for each in gradients:
            each.mul_((max_norm / (square.sqrt() + 1e-6)).clamp(max=1))
    base.step()
    with torch.no_grad():
        for parameter, copied in zip(parameters, copies, strict=True):
            parameter.copy_(copied)


DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16))


def _optimizers(rank: int) -> None:
    for tensor, max_norm in ((2, 0.2), (1, None)):
        parallel_state.initialize_model_parallel(tensor)
        for dtypes in DTYPES:
            _zero1(*dtypes, max_norm)
        parallel_state.destroy_model_parallel()


def test_zero1() -> None:
    run_ranks(4, _optimizers)
