"""Zero1Optimizer over two replicas: the parameters of the plain optimizer, with half of its state on each."""

import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from nxdpp import GradScaler, parallel_state
from nxdpp.doors.nxd.neuron_zero1 import NeuronZero1Optimizer
from nxdpp.gradients.optimizer import sharded_bucket
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ranks.faults.board import board
from nxdpp.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.gradients.optimizer.optimizers import Lamb
from tests.support.run_ranks import run_ranks

SHAPES = ((7, 3), (5,), (), (0, 4), (40, 10), (1,), (16, 2, 2))
STEPS = 6
TRAININGS = r"replica has made 3 training steps before step 0 of its Zero1Optimizer, and another 4: their gradients"
CLASSES: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    AdamW_FP32OptimParams: {"lr": 0.01},
}


def make(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(rank: int, step: int, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return torch.randn(SHAPES[index], generator=generator).to(dtype)


def set_gradients(parameters: Iterable[nn.Parameter], rank: int, step: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.grad = gradient(rank, step, index, parameter.dtype)


def set_means(parameters: Iterable[nn.Parameter], step: int) -> None:
    for index, parameter in enumerate(parameters):
        both = [gradient(rank, step, index, parameter.dtype) / 2 for rank in range(2)]
        parameter.grad = both[0] + both[1]


def assert_same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def every_class(rank: int) -> None:
    for optimizer_class, options in CLASSES.items():
        ours, theirs = make(), make()
        groups: list[dict[str, Any]] = [{"params": ours[:3]}, {"params": ours[3:], "lr": 0.02}]
        twins: list[dict[str, Any]] = [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.02}]
        is_first = optimizer_class is torch.optim.AdamW
        # The cap of one KiB gives several buckets.
        cap = 2**-10 if is_first else 25
        optimizer = Zero1Optimizer(groups, optimizer_class, grad_clipping=False, bucket_cap_mb=cap, **options)
        plain = optimizer_class(twins, **options)
        for step in range(STEPS if is_first else 3):
            set_gradients(ours, rank, step)
            set_means(theirs, step)
            optimizer.step()
            plain.step()
        assert_same(ours, theirs)


def clipping_and_schedulers(rank: int) -> None:
    ours, theirs = make(), make()
    optimizer = NeuronZero1Optimizer(
        ours,
        torch.optim.AdamW,
        lr=0.1,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
        max_norm=0.5,
    )
    plain = torch.optim.AdamW(theirs, lr=0.1)
    schedulers = [OneCycleLR(each, 0.2, total_steps=10) for each in (optimizer, plain)]
    for step in range(4):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        assert optimizer.step(lambda: "closure") == "closure"
        plain.step()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        for scheduler in schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"] != (0.9, 0.999)
    assert_same(ours, theirs)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours)
    set_gradients(ours, rank, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours)


def missing_gradients(rank: int) -> None:
    ours, theirs = make(), make()
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1, weight_decay=0.5)
    plain = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.5)
    for step in range(3):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        # Parameter 0 has no gradient on rank 1, parameter 4 has none anywhere.
        theirs[0].grad = gradient(0, step, 0) / 2
        if rank == 1:
            ours[0].grad = None
        ours[4].grad = theirs[4].grad = None
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)
    assert torch.equal(ours[4], make()[4])


def half_parameters(rank: int) -> None:
    ours, masters = make(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in make(torch.bfloat16)]
    plain = torch.optim.AdamW(masters, lr=1e-3)
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=1e-3)
    unsharded = make(torch.bfloat16)
    fp32 = AdamW_FP32OptimParams(unsharded, lr=1e-3)

    def step_all(step: int) -> None:
        set_gradients(ours, rank, step)
        set_means(unsharded, step)
        for master, parameter in zip(masters, unsharded, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        fp32.step()
        plain.step()
        for parameters in (ours, unsharded):
            assert all(torch.equal(p, m.bfloat16()) for p, m in zip(parameters, masters, strict=True))

    for step in range(4):
        step_all(step)
    # Values that a program loads replace the master copies; others keep their low bits.
    with torch.no_grad():
        for parameters in (ours, unsharded, masters):
            parameters[4][1:3] = 2.0
            # This leaves no trace in the version of the parameter.
            parameters[6].data[0] = 3.0
    step_all(4)
    # A saved state continues alike.
    for each in (optimizer, fp32):
        saved = copy.deepcopy(each.state_dict())
        assert {value.dtype for value in tensors(saved) if value.dim()} == {torch.float32}
        each.load_state_dict(saved)
    step_all(5)


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors(child)]


def bytes_of_state(rank: int) -> int:
    parameters = [nn.Parameter(torch.zeros(101, 7)), nn.Parameter(torch.zeros(33))]
    optimizer = Zero1Optimizer(parameters, torch.optim.AdamW)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(t.nbytes for _, _, state in optimizer.shards() for t in state.values() if t.dim())


def scaled(rank: int) -> None:
    ours, theirs = make(), make()
    scaler = GradScaler(init_scale=4.0)
    scaler.begin_step(ours[0].device)
    optimizer = Zero1Optimizer(ours, torch.optim.SGD, grad_clipping=False, lr=0.1)
    plain = torch.optim.SGD(theirs, lr=0.1)
    for step in range(2):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        for parameter in ours:
            assert parameter.grad is not None
            parameter.grad *= scaler.get_scale()
        if step == 1 and rank == 1:
            assert ours[0].grad is not None
            ours[0].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            plain.step()
    assert_same(ours, theirs)
    assert scaler.get_scale() == 2.0


def refusals(rank: int) -> None:
    parameters = make()
    flat = "does not step flat parts of dense parameters"
    cases: list[tuple[type[Optimizer], str]] = [
        (optim.Muon, "does not change each element by itself"),
        (optim.SparseAdam, f"takes sparse gradients, and {flat}"),
        (Lamb, r'is not known, .*nxdpp.declare_optimizer\(Lamb, looks_at="element"\)'),
    ]
    for refused, told in cases:
        with pytest.raises(ValueError, match=rf"^{refused.__name__} {told}.*or use {refused.__name__} without shard"):
            Zero1Optimizer(parameters, refused, lr=0.1)
    with pytest.raises(ValueError, match=r"a group has a parameter twice, .* leave one of them out"):
        Zero1Optimizer([parameters[0], parameters[0]], torch.optim.AdamW)
    with pytest.raises(RuntimeError, match=r"after move_model_to_device\(\)"):
        Zero1Optimizer([nn.Parameter(torch.empty(3, device="meta"))], torch.optim.AdamW)
    for argument, message in (
        ({"sharding_groups": [[0], [1]]}, r"sharding_groups=\[\[0\], \[1\]\] are other ranks .*leave it out"),
        ({"lazy_init": True}, r"lazy_init=True is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            NeuronZero1Optimizer(parameters, torch.optim.AdamW, **argument)
    embedding = nn.Embedding(4, 2, sparse=True)
    if not embedding.weight.is_cpu:
        # The fake accelerator has no sparse tensors.
        return
    optimizer = Zero1Optimizer(embedding.parameters(), torch.optim.SGD)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse=False"):
        optimizer.step()


def replicas_that_differ(rank: int) -> None:
    # Below step(), which would end the ranks.
    optimizer = Zero1Optimizer(make(), torch.optim.SGD)
    optimizer._steps = 1 + 2 * rank
    with pytest.raises(RuntimeError, match=r"a data-parallel replica is in step 1 of its Zero1Optimizer, and another "):
        optimizer._present_anywhere()
    # A replica has left out a step of the optimizer.
    optimizer = Zero1Optimizer(make(), torch.optim.SGD)
    calls = mock.patch.object(board, "training_steps", return_value=3 + rank)
    with calls, pytest.raises(RuntimeError, match=TRAININGS):
        optimizer._present_anywhere()
    # Groups of one replica need no process group.
    optimizer = Zero1Optimizer(make(), torch.optim.SGD, sharding_groups=1 + rank)
    with pytest.raises(RuntimeError, match="or another max_norm, sharding_groups or whole_gradients: each would step"):
        optimizer._present_anywhere()
    optimizer = Zero1Optimizer(make()[rank:], torch.optim.SGD)
    with pytest.raises(RuntimeError, match=r"different parameters \(6 and 7, of different layouts\)"):
        optimizer._present_anywhere()


def frozen_for_a_step(rank: int) -> None:
    """A parameter that is frozen and trained again keeps its state; one in another memory format keeps its order."""
    ours, theirs = make(), make()
    ours[6].data = ours[6].data.transpose(0, 2).contiguous().transpose(0, 2)
    assert not ours[6].is_contiguous()
    optimizer = Zero1Optimizer(ours, torch.optim.AdamW, grad_clipping=False, lr=0.1)
    plain = torch.optim.AdamW(theirs, lr=0.1)
    for step in range(4):
        set_gradients(ours, rank, step)
        set_means(theirs, step)
        for parameters in (ours, theirs):
            parameters[3].requires_grad_(step != 1)
            parameters[4].requires_grad_(step != 1)
            if step == 1:
                parameters[3].grad = parameters[4].grad = None
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)


def other_options(rank: int) -> None:
    # Below step(), which would end the ranks.
    for changed in ("lr", "max_norm"):
        optimizer = Zero1Optimizer(make(), torch.optim.SGD, lr=0.1)
        if changed == "lr":
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
        else:
            optimizer.max_norm = 1.0 + rank
        with pytest.raises(RuntimeError, match=r"different options in the groups of their Zero1Optimizer, such as lr"):
            optimizer._present_anywhere()
        # A tensor is not compared: that would wait for its device.
        optimizer = Zero1Optimizer(make(), torch.optim.SGD, lr=0.1, grad_clipping=False)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        optimizer._present_anywhere()


def messages(rank: int) -> None:
    """Gradients are reduce-scattered in buckets, and a master copy has half of a half parameter's elements."""
    parameters = [nn.Parameter(torch.ones(100 + each, dtype=torch.bfloat16)) for each in range(8)]
    optimizer = Zero1Optimizer(parameters, torch.optim.AdamW, lr=0.1, bucket_cap_mb=450 / 2**20)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    with (
        mock.patch.object(sharded_bucket, "_reduce_scatter", wraps=sharded_bucket._reduce_scatter) as reduced,
        mock.patch.object(sharded_bucket, "_all_gather", wraps=sharded_bucket._all_gather) as gathered,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as numbers,
    ):
        optimizer.step()
    whole = sum(parameter.numel() for parameter in parameters)
    # Two parameters in each bucket, and an element of padding in some.
    assert len(reduced.call_args_list) == len(gathered.call_args_list) == 4
    assert 0 <= sum(call.args[0].numel() for call in reduced.call_args_list) - whole // 2 <= 4
    # No gradient is among what all ranks reduce: positions, flags and a norm.
    assert all(call.args[0].numel() <= 16 for call in numbers.call_args_list)
    masters = [values for _, values, _ in optimizer.shards()]
    assert {values.dtype for values in masters} == {torch.float32}
    assert abs(sum(values.numel() for values in masters) - whole // 2) <= 4


CASES: list[Callable[[int], Any]] = [
    frozen_for_a_step,
    other_options,
    messages,
    every_class,
    clipping_and_schedulers,
    missing_gradients,
    half_parameters,
    bytes_of_state,
    scaled,
    refusals,
    replicas_that_differ,
]


def run_cases(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    return {case.__name__: case(rank) for case in CASES}


def test_two_replicas_step_as_the_plain_optimizer_with_half_its_state() -> None:
    results = run_ranks(2, run_cases)
    whole = 2 * 4 * (101 * 7 + 33)
    sizes = [result["bytes_of_state"] for result in results]
    assert sizes == [whole // 2, whole // 2]
