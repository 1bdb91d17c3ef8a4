"""Attributes of NeuronX Distributed's scripts, and models on the meta device as its guide makes them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, init_on_device, parallel_state
from tests.support.by_position import ByPosition
from tests.support.models import make
from tests.support.plain_models import WIDTH, Base, Block

CONFIG = {"hidden_size": WIDTH}


class Model(Base):
    """Four blocks, and a buffer that the constructor computes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())
        self.config = CONFIG
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x) * self.scale.sum()


def recipe(dist_model: Any) -> list[str]:
    """Wrap each transformer layer of this rank; return their names."""
    found = []
    for name, module in dist_model.local_module.named_children():
        if type(module) is dist_model.transformer_layer_cls:
            dist_model.local_module.add_module(name, ByPosition(module))
            found.append(name)
    return found


@pytest.fixture
def wrapped() -> Iterator[Any]:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=1, pipeline_model_parallel_size=2)
    yield NxDPPModel(Model(), "Block", num_microbatches=2)
    parallel_state.destroy_model_parallel()


def test_attributes_of_scripts(wrapped: Any) -> None:
    assert wrapped.original_torch_module is wrapped.original_module
    assert (wrapped.pipeline_parallel_rank, wrapped.pipeline_parallel_size) == (1, 2)
    assert wrapped.transformer_layer_cls is Block
    assert wrapped.partitioned
    assert wrapped.virtual_pipeline_size == 1
    assert wrapped.local_stage_modules == [wrapped.local_module]
    assert wrapped.config is CONFIG
    assert [name for name, _ in wrapped.local_named_children()] == ["blocks.2", "blocks.3", "head"]
    assert [type(module) for module in wrapped.local_children()] == [Block, Block, nn.Linear]
    assert set(wrapped.local_modules()) == set(wrapped.local_module.modules())
    assert [buffer.item() for buffer in wrapped.local_buffers()] == [0.5]
    assert wrapped.head is wrapped.original_module.head
    with pytest.raises(
        AttributeError, match=r"the Model that it wraps has one\. local_module\.embedding has this rank's"
    ):
        wrapped.embedding  # noqa: B018


def test_a_buffer_is_on_meta_where_asked_and_needs_a_value(one_rank: None) -> None:
    with init_on_device(torch.device("meta"), force_custom_init_on_device=True):
        model = Model()
    assert model.scale.item() == 0.5
    assert model.head.weight.is_meta
    with init_on_device(torch.device("meta"), include_buffers=True):
        model = Model()
    assert model.scale.is_meta
    wrapped = NxDPPModel(model, "Block")
    with pytest.raises(RuntimeError, match="scale"):
        wrapped.materialise()
    wrapped.load_state_dict(Model().state_dict())
    assert wrapped.get_buffer("scale").item() == 0.5


def test_an_init_function_without_a_branch_for_norms_is_refused(one_rank: None) -> None:
    """As the function of NxD's pipeline guide for ``LlamaRMSNorm``."""
    with init_on_device(torch.device("meta")):
        model = make("llama")
    with pytest.raises(RuntimeError, match=r"left without values by param_init_fn:\n  model.layers.0.input_layernorm"):
        NxDPPModel(model, "LlamaDecoderLayer", param_init_fn=guides_init_weights)


def guides_init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
