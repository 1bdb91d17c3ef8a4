"""Cases of NeuronX Distributed's integration tests, with their calls, on gloo: layers, attention, norms and ZeRO-1.

docs/migrating.md counts the cases; those that are not here have tests of their own in ``tests/tensor``.
"""

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nxdpp import parallel_layers
from nxdpp.modules import qkv_linear
from nxdpp.optimizer import NeuronZero1Optimizer
from nxdpp.parallel_layers import layers, mappings, parallel_state
from nxdpp.parallel_layers.grads import get_grad_norm
from nxdpp.parallel_layers.random import model_parallel_xla_manual_seed
from tests.support.run_ranks import run_ranks

SEQUENCE, BATCH, HIDDEN = 8, 3, 16


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


def _own(whole: torch.Tensor, dim: int) -> torch.Tensor:
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size, dim)[rank].contiguous()


def _close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _like(weight: torch.Tensor) -> nn.Linear:
    """A linear layer of one process with the whole initial weight of a parallel one."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def _sequence_parallel() -> None:
    model_parallel_xla_manual_seed(1234)
    row = layers.RowParallelLinear(
        HIDDEN, HIDDEN, bias=False, input_is_parallel=True, sequence_parallel_enabled=True, keep_master_weight=True
    )
    column = layers.ColumnParallelLinear(
        HIDDEN, HIDDEN, bias=False, gather_output=False, sequence_parallel_enabled=True, keep_master_weight=True
    )
    for layer, given_dim, output_dim in ((row, 2, 0), (column, 0, 2)):
        x, weights = torch.randn(2, SEQUENCE, BATCH, HIDDEN)
        given, theirs = _own(x, given_dim).requires_grad_(), x.clone().requires_grad_()
        assert layer.master_weight is not None
        reference = _like(layer.master_weight)
        found, expected = layer(given), reference(theirs)
        (found * _own(weights, output_dim)).sum().backward()
        (expected * weights).sum().backward()
        assert theirs.grad is not None
        assert reference.weight.grad is not None
        _close(found, _own(expected, output_dim))
        _close(given.grad, _own(theirs.grad, given_dim))
        _close(layer.weight.grad, _own(reference.weight.grad, 1 if layer is row else 0))


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Context ``(B, S, heads * HIDDEN)`` of query, key and value ``(S, B, ...)``, without a softmax as in NxD."""
    query, key, value = (each.unflatten(-1, (-1, HIDDEN)).permute(1, 2, 0, 3) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) / HIDDEN
    return (scores @ value.repeat_interleave(groups, 1)).transpose(1, 2).flatten(2)


def _qkv(multiplier: int, fuse_qkv: bool) -> None:
    """Each rank has a query head; copies of a key-value head are on neighbouring ranks."""
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    model_parallel_xla_manual_seed(1234)
    qkv = qkv_linear.GQAQKVColumnParallelLinear(
        HIDDEN,
        [size * HIDDEN, size * HIDDEN // multiplier],
        bias=False,
        gather_output=False,
        sequence_parallel_enabled=True,
        keep_master_weight=True,
        kv_size_multiplier=multiplier,
        fuse_qkv=fuse_qkv,
    )
    row = layers.RowParallelLinear(size * HIDDEN, HIDDEN, bias=False, input_is_parallel=True, keep_master_weight=True)
    x, weights = torch.randn(2, SEQUENCE, BATCH, HIDDEN)
    found = row(_attended(*qkv(_own(x, 0))))
    references = [_like(getattr(qkv, f"master_weight_{letter}")) for letter in "qkv"]
    assert row.master_weight is not None
    expected = _like(row.master_weight)(_attended(*(each(x) for each in references)))
    weights = weights.transpose(0, 1)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    _close(found, expected)
    for letter, reference in zip("qkv", references, strict=True):
        parts = size if letter == "q" else size // multiplier
        assert reference.weight.grad is not None
        part = reference.weight.grad.chunk(parts)[rank * parts // size]
        _close(qkv.get_parameter(f"weight_{letter}").grad, part)


class _Resnet(nn.Module):
    """A residual block of a diffusion model, with the time's embedding added between two convolutions."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, outputs)
        self.conv1: nn.Module = nn.Conv2d(channels, outputs, 3, padding=1)
        self.conv2: nn.Module = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut: nn.Module = nn.Conv2d(channels, outputs, 1)
        self.time = nn.Linear(HIDDEN, outputs)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[..., None, None]
        y: torch.Tensor = self.shortcut(x) + self.conv2(functional.silu(self.norm2(hidden)))
        return y


def _sharded(conv: Any, kind: type[nn.Module], **options: bool) -> nn.Module:
    """A divided convolution with the values of ``conv``, as NxD's test makes one."""
    shape = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding)
    layer: Any = kind(*shape, bias=True, **options)
    layer.weight.data = _own(conv.weight.data, 0 if kind is layers.OutputChannelParallelConv2d else 1)
    layer.bias.data = _own(conv.bias.data, 0) if kind is layers.OutputChannelParallelConv2d else conv.bias.data.clone()
    assert isinstance(layer, nn.Module)
    return layer


def _resnet(is_pair: bool) -> None:
    torch.manual_seed(1)
    whole, part = _Resnet(8, 8), _Resnet(8, 8)
    part.load_state_dict(whole.state_dict())
    if is_pair:
        part.conv1 = _sharded(part.conv1, layers.OutputChannelParallelConv2d, gather_output=True)
        part.conv2 = _sharded(part.conv2, layers.InputChannelParallelConv2d, input_is_parallel=False)
    else:
        for name in ("conv1", "conv2", "shortcut"):
            conv = _sharded(part.get_submodule(name), layers.OutputChannelParallelConv2d, gather_output=True)
            setattr(part, name, conv)
    inputs = torch.randn(2, 8, 6, 6), torch.randn(2, HIDDEN)
    given, theirs = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    found, expected = part(*given), whole(*theirs)
    for output in (found, expected):
        functional.mse_loss(output, output.detach() * 1.1).backward()
    _close(found, expected)
    _close([each.grad for each in given], [each.grad for each in theirs])
    for name, parameter in part.named_parameters():
        full = whole.get_parameter(name).grad
        assert full is not None
        dim = getattr(parameter, "partition_dim", -1)
        _close(parameter.grad, full if dim < 0 else _own(full, dim))


def _layers(rank: int) -> None:
    for size in (1, 2, 4):
        parallel_state.initialize_model_parallel(size)
        assert (size, rank % size) == (
            parallel_state.get_tensor_model_parallel_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        assert parallel_state.get_tensor_model_parallel_src_rank() == rank // size * size
        _sequence_parallel()
        for multiplier, fuse_qkv in product([each for each in (1, 2, 4) if each <= size], (False, True)):
            _qkv(multiplier, fuse_qkv)
        for is_pair in (False, True):
            _resnet(is_pair)
        parallel_state.destroy_model_parallel()


def test_layers_attention_and_convolutions() -> None:
    run_ranks(4, _layers)


def _clipping(tensor: int, pipeline: int) -> None:
    """ZeRO-1 clips by the norm of a model with a linear layer in each stage, of which each rank has one."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    torch.manual_seed(1234)
    divided = [layers.ColumnParallelLinear(HIDDEN, HIDDEN, keep_master_weight=True) for _ in range(pipeline)]
    plain = [nn.Linear(HIDDEN, HIDDEN) for _ in range(pipeline)]
    for one, other in zip(plain, divided, strict=True):
        assert other.master_weight is not None
        assert other.bias is not None
        with torch.no_grad():
            one.weight.copy_(other.master_weight)
            # Whole, since the output is gathered.
            one.bias.copy_(other.bias)
        one.weight.grad, one.bias.grad = 10 * torch.randn(HIDDEN, HIDDEN), 10 * torch.randn(HIDDEN)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own, its_plain = divided[stage], plain[stage]
    assert own.bias is not None
    assert its_plain.weight.grad is not None
    assert its_plain.bias.grad is not None
    own.weight.grad, own.bias.grad = _own(its_plain.weight.grad, 0).clone(), its_plain.bias.grad.clone()
    optimizer = NeuronZero1Optimizer(
        list(own.parameters()),
        torch.optim.SGD,
        lr=0.01,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_replica_groups(),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
        max_norm=1.0,
        grad_clipping=True,
    )
    parameters = [parameter for layer in plain for parameter in layer.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.reduce_gradients()
    _close(optimizer.clip_gradients(1.0), norm)
    after = get_grad_norm(
        [piece for group in optimizer.base_optimizer.param_groups for piece in group["params"]],
        norm_type=2,
        zero1_optimizer=True,
        zero1_optimizer_groups=parallel_state.get_data_parallel_replica_groups(),
    )
    _close(after, torch.tensor(1.0))
    optimizer.step()
    torch.optim.SGD(parameters, lr=0.01).step()
    _close(own.weight, _own(its_plain.weight.detach(), 0))
    _close(own.bias, its_plain.bias)
    parallel_state.destroy_model_parallel()


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
    for tensor, pipeline in ((1, 1), (4, 1), (2, 1), (2, 2)):
        _clipping(tensor, pipeline)
    for tensor, pipeline in ((2, 1), (1, 2), (1, 1)):
        parallel_state.initialize_model_parallel(tensor, pipeline)
        for dtypes, max_norm in product(DTYPES, (None, 1.0, 0.2)):
            _zero1(*dtypes, max_norm)
        parallel_state.destroy_model_parallel()


def test_clipping_and_zero1() -> None:
    """27 cases of ZeRO-1: three layouts, three pairs of dtypes, three kinds of clipping."""
    run_ranks(4, _optimizers)
