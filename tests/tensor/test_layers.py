"""Tensor-parallel layers on 2 and 4 ranks equal torch's layers in one process: outputs, gradients, initial values."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.padding import whole_of
from tests.support.local_slice import local_slice
from tests.support.run_ranks import run_ranks

SHAPES = {2: (12, 8), 3: (8, 3, 8)}
INPUT, OUTPUT = 8, 24


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _own(whole: torch.Tensor, dim: int, stride: int = 1) -> torch.Tensor:
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    return local_slice(whole, dim, rank, size, stride)


def _close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _built_like(layer: Callable[[], nn.Module], torch_layer: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Build both with one seed; verify that both draw the same numbers."""
    torch.manual_seed(11)
    whole = torch_layer()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    part = layer()
    assert torch.equal(torch.get_rng_state(), state)
    return part, whole


def _compare_gradients(part: Any, whole: Any, stride: int = 1) -> None:
    for name, parameter in part.named_parameters():
        full = whole.get_parameter(name)
        dim = parameter.partition_dim
        if dim < 0:
            assert torch.equal(parameter, full)
            _close(parameter.grad, full.grad)
        else:
            assert torch.equal(parameter, _own(full, dim, stride))
            _close(parameter.grad, _own(full.grad, dim, stride))


def _column(dims: int, bias: bool, gather: bool, stride: int, needs_gradient: bool) -> None:
    layer = partial(ColumnParallelLinear, INPUT, OUTPUT, bias=bias, gather_output=gather, stride=stride)
    part, whole = _built_like(layer, partial(nn.Linear, INPUT, OUTPUT, bias=bias))
    x = _random(*SHAPES[dims]).requires_grad_(needs_gradient)
    theirs = x.detach().clone().requires_grad_(needs_gradient)
    found, expected = part(x), whole(theirs)
    weights = _random(*expected.shape, seed=4)
    if not gather:
        expected_part, weights_part = _own(expected, -1, stride), _own(weights, -1, stride)
    else:
        expected_part, weights_part = expected, weights
    _close(found, expected_part)
    # In place, as an activation may be.
    (found.mul_(2) * weights_part).sum().backward()
    (expected * 2 * weights).sum().backward()
    if needs_gradient:
        _close(x.grad, theirs.grad)
    _compare_gradients(part, whole, stride)


def _row(dims: int, bias: bool, parallel: bool, stride: int) -> None:
    layer = partial(RowParallelLinear, INPUT, OUTPUT, bias=bias, input_is_parallel=parallel, stride=stride)
    part, whole = _built_like(layer, partial(nn.Linear, INPUT, OUTPUT, bias=bias))
    theirs = _random(*SHAPES[dims]).requires_grad_()
    given = (_own(theirs.detach(), -1, stride) if parallel else theirs.detach()).clone().requires_grad_()
    found, expected = part(given), whole(theirs)
    _close(found, expected)
    weights = _random(*expected.shape, seed=4)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert theirs.grad is not None
    _close(given.grad, _own(theirs.grad, -1, stride) if parallel else theirs.grad)
    _compare_gradients(part, whole, stride)


def _embedding(vocabulary: int, padding_idx: int | None, sequence: bool) -> None:
    layer = partial(ParallelEmbedding, vocabulary, 6, padding_idx=padding_idx, sequence_parallel_enabled=sequence)
    part, whole = _built_like(layer, partial(nn.Embedding, vocabulary, 6, padding_idx=padding_idx))
    ids = torch.randint(vocabulary, (5, 4), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = padding_idx or 0
    found, expected = part(ids), whole(ids)
    if sequence:
        # As in NeuronX Distributed, ids (B, S) become (S / ranks, B, H).
        expected = expected.transpose(0, 1)
    weights = _random(*expected.shape, seed=4)
    if sequence:
        (found * _own(weights, 0)).sum().backward()
    else:
        (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(found, _own(expected, 0) if sequence else expected)
    size = part.tensor_parallel_size
    missing = part.num_embeddings_per_partition * size - vocabulary
    padded = functional.pad(whole.weight.detach(), (0, 0, 0, missing))
    assert torch.equal(part.weight, _own(padded, 0))
    _close(part.weight.grad, _own(functional.pad(whole.weight.grad, (0, 0, 0, missing)), 0))
    # Other devices tell it later.
    for outside in (-1, vocabulary) if found.is_cpu else ():
        with pytest.raises(IndexError):
            part(torch.tensor([outside]))


class _Pair(nn.Module):
    """A norm and two linear layers, in parallel or not."""

    def __init__(self, up: nn.Module, down: nn.Module, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return hidden


def _pair(dims: int, sequence_dimension: int | None) -> None:
    sequence: dict[str, Any] = {}
    if sequence_dimension is not None:
        sequence = {"sequence_parallel_enabled": True, "sequence_dimension": sequence_dimension}

    def parallel() -> nn.Module:
        up = ColumnParallelLinear(INPUT, OUTPUT, gather_output=False, **sequence)
        return _Pair(up, RowParallelLinear(OUTPUT, INPUT, input_is_parallel=True, **sequence), INPUT)

    def in_one() -> nn.Module:
        up = nn.Linear(INPUT, OUTPUT)
        return _Pair(up, nn.Linear(OUTPUT, INPUT), INPUT)

    part, whole = _built_like(parallel, in_one)
    shape = list(SHAPES[dims])
    if sequence_dimension == 1:
        shape[:2] = shape[1::-1] if dims > 2 else shape[:2]
    theirs = _random(*shape).requires_grad_()
    dim = sequence_dimension
    given = (theirs.detach() if dim is None else _own(theirs.detach(), dim)).clone().requires_grad_()
    found, expected = part(given), whole(theirs)
    weights = _random(*expected.shape, seed=4)
    (found * (weights if dim is None else _own(weights, dim))).sum().backward()
    (expected * weights).sum().backward()
    assert theirs.grad is not None
    _close(found, expected if dim is None else _own(expected, dim))
    _close(given.grad, theirs.grad if dim is None else _own(theirs.grad, dim))
    assert part.down.bias.sequence_parallel_enabled == (dim is not None)
    if dim is None:
        _compare_gradients_of_pair(part, whole)
    else:
        _compare_gradients(part.up, whole.up)


def _compare_gradients_of_pair(part: Any, whole: Any) -> None:
    _compare_gradients(part.up, whole.up)
    _compare_gradients(part.down, whole.down)
    _close(part.norm.weight.grad, whole.norm.weight.grad)


def _padded(stride: int, parallel: bool) -> None:
    """Sizes that do not divide, with ``pad=True``."""
    inner = 5 * stride

    def layers() -> nn.Module:
        up = ColumnParallelLinear(INPUT, inner, gather_output=not parallel, stride=stride, pad=True)
        return nn.Sequential(up, RowParallelLinear(inner, INPUT, input_is_parallel=parallel, stride=stride, pad=True))

    part, whole = _built_like(layers, lambda: nn.Sequential(nn.Linear(INPUT, inner), nn.Linear(inner, INPUT)))
    given, theirs = (_random(4, 3, INPUT).requires_grad_() for _ in range(2))
    found, expected = part(given), whole(theirs)
    _close(found, expected)
    for output in (found, expected):
        output.square().sum().backward()
    _close(given.grad, theirs.grad)
    for name, parameter in part.named_parameters():
        full = whole.get_parameter(name)
        if parameter.partition_dim < 0:
            continue
        assert torch.equal(whole_of(parameter), full)
        vars(parameter.grad).update(vars(parameter))
        _close(whole_of(parameter.grad), full.grad)


def _reduce_dtype(rank: int, size: int) -> None:
    """Sums of 256 and ones: bfloat16 loses each one that is added to 256."""
    half: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "init_method": nn.init.ones_}
    number = 256.0 if rank == 0 else 1.0
    expected = torch.tensor(256.0 + size - 1).bfloat16()
    for sequence in (False, True):
        more: dict[str, Any] = {"reduce_dtype": torch.float32, "sequence_parallel_enabled": sequence, **half}
        row = RowParallelLinear(size, 1, input_is_parallel=True, **more)
        found = row(torch.full((size, 1), number).bfloat16())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected.expand_as(found))
        column = ColumnParallelLinear(1, size, gather_output=False, **more)
        for is_trained in (True, False):
            column.requires_grad_(is_trained)
            x = torch.ones(1 if sequence else size, 1, dtype=torch.bfloat16, requires_grad=True)
            output = column(x)
            output.backward(torch.full_like(output, number))
            assert x.grad is not None
            assert torch.equal(x.grad, expected.expand_as(x)), (sequence, is_trained)


def _refusals(size: int) -> None:
    with pytest.raises(
        ValueError, match=f"output_size=25.*tensor-parallel size {size}: give a multiple of {size}, or pad=True"
    ):
        ColumnParallelLinear(8, 25)
    with pytest.raises(ValueError, match=f"input_size=9.*tensor-parallel size {size} times stride=3"):
        RowParallelLinear(9, 8, stride=3)
    with pytest.raises(ValueError, match="needs input_is_parallel=True"):
        RowParallelLinear(8, 8, sequence_parallel_enabled=True)
    with pytest.raises(TypeError, match=r"fifth argument of ColumnParallelLinear is .*give dtype=torch.float16 and"):
        ColumnParallelLinear(8, 8, True, False, torch.float16)  # type: ignore[arg-type]  # NxD's order
    with pytest.raises(ValueError, match="does not divide by the tensor-parallel size: 7 = "):
        RowParallelLinear(8, 8)(torch.zeros(2, 7))


def _all_cases(rank: int, size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for dims in SHAPES:
        for bias in (True, False):
            for whole in (True, False):
                _column(dims, bias, whole, 1, True)
                _row(dims, bias, whole, 1)
        _pair(dims, None)
        _pair(dims, 0)
    _pair(3, 1)
    for whole in (True, False):
        _column(3, True, whole, 3, True)
        _row(3, True, whole, 2)
    _column(3, True, True, 1, False)
    for vocabulary, padding_idx in ((13, 3), (9, 8), (1, None)):
        _embedding(vocabulary, padding_idx, sequence=False)
        _embedding(vocabulary, padding_idx, sequence=True)
    for stride in (1, 3):
        _padded(stride, parallel=True)
        _padded(stride, parallel=False)
    _reduce_dtype(rank, size)
    _refusals(size)
    parallel_state.destroy_model_parallel()


def test_layers_equal_those_of_one_process() -> None:
    run_ranks(4, _all_cases, 4)


@pytest.fixture
def second_of_two() -> Iterator[None]:
    parallel_state.initialize_debug(tensor_model_parallel_rank=1, tensor_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("second_of_two")
def test_a_layer_runs_on_the_rank_that_it_was_built_for() -> None:
    column = ColumnParallelLinear(8, 8, device="meta")
    x = torch.zeros(2, 8, device="meta")
    assert column(x).shape == (2, 8)
    for rank, size in ((0, 2), (1, 4)):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_debug(tensor_model_parallel_rank=rank, tensor_model_parallel_size=size)
        with pytest.raises(RuntimeError, match=f"built on tensor-parallel rank 1 of 2, and runs on rank {rank} of"):
            column(x)
