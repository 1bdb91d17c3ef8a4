"""``gather_state_dict``: whole tensors on rank 0, to the bit, from every layout of ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import nxdpp
from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import make

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(make, "llama"),
    "tied llama": partial(make, "llama", tie_word_embeddings=True),
    "mixtral": partial(make, "mixtral"),
}


def _half() -> nn.Module:
    model: nn.Module = make("llama").to(torch.bfloat16)
    return model


MODELS["half"] = _half


class Divided(nn.Module):
    """Rows behind the vocabulary, copied parts of keys, a buffer without dimensions, and one without elements."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = ParallelEmbedding(5, 4)
        self.keys = GQAQKVColumnParallelLinear(4, [16, 8], kv_size_multiplier=copies)
        self.head = ColumnParallelLinear(4, 8, gather_output=True)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 2))


def _differences(gathered: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that differ in place, dtype or values."""
    names = list(expected)
    if list(gathered) != names:
        return ["names"]
    return [
        name
        for name in names
        if gathered[name].dtype is not expected[name].dtype or not torch.equal(gathered[name], expected[name].cpu())
    ]


def _check(model: Any, name: str, rank: int) -> None:
    gathered = nxdpp.gather_state_dict(model)
    if rank > 0:
        assert gathered is None
        return
    assert gathered is not None
    assert _differences(gathered, MODELS[name]().state_dict()) == [], name


def _all_cases(rank: int) -> None:
    with _sizes(1, 1):
        expected = Divided(copies=1).state_dict()
        assert expected["rows.weight"].shape == (5, 4)
    with _sizes(2, 2, ("data", "pipeline", "tensor")):
        for name in ("tied llama", "mixtral"):
            _check(NxDPPModel(tensor_parallelize(MODELS[name]()), num_microbatches=2), name, rank)
    with _sizes(4, 1):
        _check(tensor_parallelize(MODELS["llama"](), pad_heads=True), "llama", rank)
        gathered = nxdpp.gather_state_dict(Divided(copies=2))
        assert gathered is None or _differences(gathered, expected) == []
    with _sizes(2, 1):
        # Values of other replicas are not asked for.
        model = tensor_parallelize(MODELS["half"]())
        if parallel_state.get_data_parallel_rank() > 0:
            model.to("meta")
        _check(model, "half", rank)
    with _sizes(1, 2):
        _elsewhere(rank)


@contextmanager
def _sizes(tensor: int, pipeline: int, order: Sequence[str] = ("pipeline", "data", "tensor")) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor, pipeline, order=order)
    yield
    parallel_state.destroy_model_parallel()


def _elsewhere(rank: int) -> None:
    """Each pipeline rank has some tensors of a module, and the others on the meta device."""
    model = MODELS["llama"]()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for number, module in enumerate(list(model.modules())):
        if number % 2 != stage:
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to("meta")))
    _check(model, "llama", rank)
    # A name without values anywhere ends the call on all ranks, and the next call works.
    whole = model.lm_head
    model.lm_head = nn.Linear(32, 64, bias=False, device="meta")
    with pytest.raises(ValueError, match=r"1 tensor of the model has .* \(lm_head.weight is the first\): call load"):
        nxdpp.gather_state_dict(model)
    model.lm_head = whole
    _check(model, "llama", rank)


def test_every_layout_gives_the_state_of_one_process() -> None:
    run_ranks(4, _all_cases)


def test_a_copy_of_one_rank(one_rank: None) -> None:
    first = nn.Linear(2, 3)
    model = nn.Sequential(first, nn.Linear(3, 3))
    gathered = nxdpp.gather_state_dict(model)
    assert gathered is not None
    assert _differences(gathered, model.state_dict()) == []
    with torch.no_grad():
        first.weight.zero_()
    assert gathered["0.weight"].abs().sum() > 0
