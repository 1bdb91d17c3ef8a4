"""In-place guard: an error for changes of values that other stages have copies of, found by tensor versions."""

import pytest
import torch
from torch import nn

from nxdpp.pipeline.stages.in_place_guard import expect_unchanged
from tests.support.exact import assert_exact
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainModel


class Keeping(nn.Module):
    """Keeps its first result in a buffer, as x-transformers' Alibi does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.register_buffer("first", x * 2, persistent=False)
        return x * 2


class WithTable(PlainModel):
    """Layers whose input is scaled by a table that its module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.keeping = Keeping()
        self.keeping.register_buffer("slopes", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden) * self.keeping(torch.arange(4))
        result: torch.Tensor = self.head(hidden).mean()
        return result


def test_a_table_that_is_filled_before_wrapping() -> None:
    inputs = {"x": torch.ones(2, 4)}
    with pytest.raises(RuntimeError, match=r"keeping\.forward changes its buffer first.* run the model once"):
        assert_exact(WithTable(), inputs)
    model = WithTable()
    model(**inputs)
    assert_exact(model, inputs)


class Late(nn.Module):
    """A layer that may change its second argument in place, as its class tells."""

    changes = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * scale
        if Late.changes:
            scale += 1
        return result


class Scaled(nn.Module):
    """Four layers with one scale, which each stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Late() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.shape[0] * torch.ones_like(x)
        for layer in self.layers:
            x = layer(x, scale)
        return x.mean()


def test_layers_in_a_row_are_checked_once_and_a_later_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4)
    stage = InProcessPipeline(Scaled(), 2, {"x": x}, transformer_layer_cls=Late).modules[0]
    (guarded,) = [
        node.args[2] for node in stage.graph.nodes if node.target is expect_unchanged and "layers.1" in node.args[3]
    ]
    stage(x)
    monkeypatch.setattr(Late, "changes", True)
    with pytest.raises(RuntimeError, match=rf"the value {guarded}, .* by one of layers.0 to layers.1; the others"):
        stage(x)
