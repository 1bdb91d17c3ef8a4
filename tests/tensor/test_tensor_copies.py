"""Parameters of which each tensor rank has a copy: other values and other gradients on a rank are found."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nxdpp import (
    NxDPPModel,
    parallel_state,
)
from nxdpp.tensor.random import model_parallel_xla_manual_seed
from nxdpp.tensor.tensor_copies import TensorCopies
from tests.support.run_ranks import run_ranks
from tests.support.tensor_parallel_models import HIDDEN, ParallelLayer, ParallelModel

VOCABULARY = 12


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(16).view(2, 8) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def _model(sequence: bool = False) -> ParallelModel:
    model_parallel_xla_manual_seed(2)
    return ParallelModel(2, VOCABULARY, sequence)


def _train(steps: int) -> None:
    """Nothing is found in a right program: clipping, sequence parallelism, and a copy without a gradient."""
    module = _model(sequence=True)
    module.unused = nn.Linear(2, 2)
    model = NxDPPModel(module, transformer_layer_cls=ParallelLayer, num_microbatches=2)
    optimizer = torch.optim.AdamW(model.local_parameters(), lr=1e-2)
    for _ in range(steps):
        model.run_train(**_batch())
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()


def _after_a_step(change: Callable[[nn.Module], object], refused: str) -> None:
    """``change`` the gradients of one step, and compare: the optimizer's own step sends nothing."""
    module = _model()
    copies = TensorCopies(module)
    copies.verify(0)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    change(module)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=refused):
        copies.check_gradients()


def _drop_of_one(module: nn.Module) -> None:
    if parallel_state.get_tensor_model_parallel_rank() == 1:
        module.get_parameter("norm.bias").grad = None


def _clip(module: nn.Module) -> None:
    """Torch's function knows one rank's part alone; the parts have other gradients."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    module.get_parameter("head.weight").grad = torch.full_like(module.get_parameter("head.weight"), 1.0 + rank)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def _not_finite(module: nn.Module) -> None:
    """Equal on both ranks, and so no difference; the norm's bias differs."""
    module.get_parameter("norm.weight").grad = torch.full((8,), math.nan)
    module.get_parameter("norm.bias").grad = torch.full((8,), 1.0 + parallel_state.get_tensor_model_parallel_rank())


def _other_values() -> None:
    module = _model()
    copies = TensorCopies(module)
    copies.check_values(0)
    with torch.no_grad():
        module.norm.weight[3] += parallel_state.get_tensor_model_parallel_rank()
    sentence = (
        r"tensor rank 1 \(rank 1\) has other values than tensor rank 0 .* in 1 of 10 parameters .*"
        r"the first is norm\.weight.* was 5 and 6 when they"
    )
    with pytest.raises(RuntimeError, match=sentence):
        copies.check_values(5 + parallel_state.get_tensor_model_parallel_rank())


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    _train(3)
    _after_a_step(_drop_of_one, r"copy of norm\.bias.*no gradient on one .* copies that differ.* 1 of 10")
    _after_a_step(_clip, r"copy of layers\.0\.norm\.weight.*copies that differ.* 10 of 10.*use model\.clip_grad_norm_")
    _after_a_step(_not_finite, r"copy of norm\.bias.*norms 2\.82843 and 5\.65685.* copies that differ.* 1 of 10")
    _other_values()
    parallel_state.destroy_model_parallel()


def test_two_tensor_ranks() -> None:
    run_ranks(2, _cases)


def _without_marks(rank: int) -> None:
    """The second step of a pipeline finds that norms in a sequence-parallel region are not marked."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    module = _model(sequence=True)
    for part in (module, *module.layers):
        part.norm = nn.LayerNorm(HIDDEN)
    model = NxDPPModel(module, transformer_layer_cls=ParallelLayer, num_microbatches=2)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=1e-2)
    model.run_train(**_batch())
    optimizer.step()
    model.run_train(**_batch())


def test_gradients_of_parts_of_a_sequence() -> None:
    with pytest.raises(AssertionError, match=r"copy of layers\.0\.norm\.weight.*sequence-parallel layers is not m"):
        run_ranks(2, _without_marks)
