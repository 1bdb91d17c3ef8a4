"""Values that cannot cross a boundary are refused with their module; of metadata placeholders only metadata is used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, randn

from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.runtime.metadata_exchange import MetadataPlaceholder, metadata_placeholder
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


class SparseLayer(PlainLayer):
    """Takes a dense or sparse tensor, and returns a sparse one."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to_dense() if hidden.is_sparse else hidden).to_sparse()


class DenseLayer(SparseLayer):
    """The remedy: converts to and from dense tensors itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to_sparse()).to_dense()


class Sparse(PlainModel):
    def __init__(self, layer: type[PlainLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden.to_dense() if hidden.is_sparse else hidden).pow(2).mean()
        return result


def test_a_sparse_tensor_is_refused_with_its_module() -> None:
    batch = {"x": randn(4, 4)}
    pipeline = InProcessPipeline(Sparse(SparseLayer), 2, batch, transformer_layer_cls=SparseLayer)
    with pytest.raises(TypeError, match=r"sparse_coo cannot be sent [\s\S]*\n  made by layers.1"):
        pipeline.train(batch, 2)
    assert_exact(Sparse(DenseLayer), batch, DenseLayer)


CPU = torch.device("cpu")
REAL = torch.randn(2, 3, 4, dtype=torch.bfloat16)


def _make(tensor: torch.Tensor = REAL) -> torch.Tensor:
    result = metadata_placeholder(layout_of(tensor), CPU)
    assert isinstance(result, MetadataPlaceholder)
    return result


def test_tensors_are_made_from_its_metadata_and_its_data_is_an_error_with_the_remedy() -> None:
    made = torch.ones_like(_make(), dtype=torch.int64)
    assert type(made) is torch.Tensor
    assert torch.equal(made, torch.ones_like(REAL, dtype=torch.int64))
    assert torch.empty_like(_make(torch.randn(2, 3).T)).stride() == (1, 3)
    uses: list[Callable[[torch.Tensor], object]] = [
        lambda x: x + 1,
        lambda x: x[0],
        lambda x: bool(x.sum() > 0),
        lambda x: torch.cat([x, x]),
        lambda x: x.fill_(0),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"data of a value that another stage computes[\s\S]*leaf_module_cls"):
            use(_make())
