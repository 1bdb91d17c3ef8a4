"""Initial values of each rank's part: those of the whole in one process, whatever draws them and when."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import init

from nxdpp import NxDPPModel, deferred_init, init_on_device
from nxdpp.ranks import parallel_state
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.support.local_slice import local_slice


def _with_own_tensor(weight: torch.Tensor) -> None:
    weight.copy_(torch.randn(weight.shape))


def _twice(weight: torch.Tensor) -> None:
    init.normal_(weight)
    weight.data.uniform_(-1, 1).mul_(3).add_(0.5)


METHODS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": partial(init.normal_, std=0.02),
    "xavier": init.xavier_normal_,
    "truncated": partial(init.trunc_normal_, std=0.5),
    "twice": _twice,
    "orthogonal": init.orthogonal_,
    "copied": _with_own_tensor,
}


@pytest.fixture(autouse=True)
def _end_debug() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _be(rank: int, size: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(tensor_model_parallel_rank=rank, tensor_model_parallel_size=size)


@pytest.mark.parametrize("name", METHODS)
def test_any_init_method(name: str) -> None:
    method = METHODS[name]
    for shape, dim, stride in (((30, 7), 0, 3), ((24, 12), 1, 2), ((6, 18), 0, 1), ((40, 1), 0, 1)):
        torch.manual_seed(3)
        whole = torch.empty(shape)
        with torch.no_grad():
            method(whole)
        state = torch.get_rng_state()
        for rank in range(2):
            _be(rank, 2)
            torch.manual_seed(3)
            layer: Any = (ColumnParallelLinear, RowParallelLinear)[dim]
            built = layer(shape[1], shape[0], bias=False, stride=stride, init_method=method)
            assert torch.equal(built.weight, local_slice(whole, dim, rank, 2, stride)), shape
            assert torch.equal(torch.get_rng_state(), state)


class _Model(nn.Module):
    """A model of linear layers and an embedding, parallel or torch's own."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(13, 8, padding_idx=2) if parallel else nn.Embedding(13, 8, padding_idx=2)
        self.layers = nn.ModuleList(_Layer(parallel) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = x.square().mean()
        return loss


class _Layer(nn.Module):
    def __init__(self, parallel: bool) -> None:
        super().__init__()
        if parallel:
            self.up: nn.Module = ColumnParallelLinear(8, 24, gather_output=False)
            self.down: nn.Module = RowParallelLinear(24, 8, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x))
        return y


def _on_meta(parallel: bool) -> nn.Module:
    with init_on_device(torch.device("meta")):
        return _Model(parallel)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (_Model, {}),
        (_on_meta, {}),
        (lambda parallel: deferred_init(_Model, parallel), {}),
    ],
    ids=["eager", "meta", "deferred"],
)
def test_a_wrapped_model(build: Callable[[bool], nn.Module], options: dict[str, Any]) -> None:
    def wrapped(parallel: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model = NxDPPModel(build(parallel), transformer_layer_cls=_Layer, input_names=["ids"], **options)
        model.move_model_to_device("cpu")
        return dict(model.local_named_parameters())

    _be(0, 1)
    expected, alone = wrapped(False), wrapped(True)
    state = torch.get_rng_state()
    assert all(torch.equal(alone[name], value) for name, value in expected.items())
    for size in (3,):
        for rank in (0, 2):
            _be(rank, size)
            for name, parameter in wrapped(True).items():
                whole, dim = expected[name].detach(), vars(parameter)["partition_dim"]
                if name == "embed.weight":
                    whole = nn.functional.pad(whole, (0, 0, 0, -13 % size))
                assert torch.equal(parameter, whole if dim < 0 else local_slice(whole, dim, rank, size)), name
                assert vars(parameter)["tensor_model_parallel"] == (dim >= 0)
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("one_rank")
def test_no_layer_keeps_its_whole_weight() -> None:
    layers: list[Callable[..., nn.Module]] = [
        partial(ColumnParallelLinear, 4, 4),
        partial(RowParallelLinear, 4, 4),
        partial(GQAQKVColumnParallelLinear, 4, (4, 4)),
    ]
    for layer in layers:
        with pytest.raises(ValueError, match="keep_master_weight=True: no layer keeps its initial whole weight"):
            layer(keep_master_weight=True)
