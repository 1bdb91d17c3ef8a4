"""Cuts after modules that are no layers, as NeuronX Distributed has them: exact, or refused with the reason."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.exact import assert_exact
from tests.support.models import make, padded_batch
from tests.support.plain_models import WIDTH, Base


class Plain(Base):
    """Embedding, blocks, a dropout, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.through(self.blocks, self.dropout(self.embedding(x)))
        return self.close(self.norm(hidden))


@pytest.fixture
def _debug() -> Iterator[None]:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=0, pipeline_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def test_a_llama_is_exact() -> None:
    pipeline = assert_exact(make("llama"), padded_batch(4), cuts=["model.embed_tokens", "model.layers.0", "model.norm"])
    assert pipeline.partition.parameters_of(0) == ["model.embed_tokens.weight"]
    assert pipeline.partition.parameters_of(3) == ["lm_head.weight"]


@pytest.mark.usefixtures("_debug")
def test_listings_have_the_transformer_layers_alone() -> None:
    wrapped = NxDPPModel(Plain(), "Block", pipeline_cuts=["embedding"])
    assert wrapped.layers == ["blocks.0", "blocks.1", "blocks.2"]
    assert wrapped.stage_layers == []
    assert wrapped.pipeline_cuts == ["embedding"]
    assert [name for name, _ in wrapped.local_named_parameters()] == ["embedding.weight", "embedding.bias"]


@pytest.mark.usefixtures("_debug")
def test_other_tracers_cut_there_too() -> None:
    wrapped = NxDPPModel(Plain(), "Block", pipeline_cuts=["norm"], tracer_cls="torch")
    assert wrapped.stage_layers == ["blocks.0", "blocks.1", "blocks.2"]
    assert "head.weight" not in dict(wrapped.local_named_parameters())


@pytest.mark.usefixtures("_debug")
@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("blocks.1.linear", r"inside the transformer layer blocks\.1.*cut after 'blocks\.1'"),
        ("blocks", "holds transformer layers"),
        ("dropout", "a Dropout without parameters"),
        ("nothing", r"\['nothing'\], which are no transformer layers.*the layers are: blocks\.0"),
        ("head", "no module with any runs after head"),
    ],
)
def test_other_places_are_refused_with_the_reason(cut: str, words: str) -> None:
    model: Any = Plain()
    with pytest.raises(ValueError, match=words):
        NxDPPModel(model, "Block", pipeline_cuts=[cut])
    assert not any(parameter.is_meta for parameter in model.parameters())
