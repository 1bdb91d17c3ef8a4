"""Values that cannot cross a boundary are refused with their module."""

import pytest
from torch import Tensor, nn, randn

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
