"""Arguments and attributes of NeuronX Distributed's scripts, and the recipe of its guide for checkpointing."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, init_on_device, parallel_state
from tests.support.by_position import ByPosition
from tests.support.models import make
from tests.support.plain_models import WIDTH, Base, Block
from tests.support.run_ranks import run_ranks

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


def model_and_batch() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(1)
    return Model(), torch.randn(8, WIDTH)


def gradients_of_one_process() -> dict[str, torch.Tensor]:
    model, batch = model_and_batch()
    for part in batch.chunk(2):
        (model(part) / 2).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def over_two_ranks(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    expected = gradients_of_one_process()
    model, batch = model_and_batch()
    full = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = NxDPPModel(
        model,
        "Block",
        num_microbatches=2,
        auto_partition=True,
        pipeline_cuts=[],
        broadcast_and_average_loss=True,
        use_optimizer_wrapper=True,
        return_loss_on_cpu=True,
    )
    names = recipe(wrapped)
    loss = wrapped.run_train(x=batch)
    assert isinstance(loss, torch.Tensor)
    gradients = [parameter.grad for parameter in wrapped.local_parameters()]
    own = [expected[name] for name, _ in model_and_batch()[0].named_parameters() if _is_local(name, names, rank)]
    same = all(torch.equal(one, two) for one, two in zip(gradients, own, strict=True) if one is not None)
    # A replacement after the first step needs refresh() on all ranks.
    if rank == 0:
        wrapped.local_module.add_module("blocks.0", copy.deepcopy(wrapped.local_module.get_submodule("blocks.0")))
        with pytest.raises(RuntimeError, match=r"replaced after the first step: call refresh\(\) on every rank"):
            wrapped.trace(x=batch)
    wrapped.refresh()
    wrapped.run_train(x=batch)

    loaded = NxDPPModel(model_and_batch()[0], "Block", num_microbatches=2)
    loaded.load_state_dict({name: value * 2 for name, value in full.items()}, strict=True)
    assert all(torch.equal(value, full[name] * 2) for name, value in loaded.local_state_dict().items())
    parallel_state.destroy_model_parallel()
    return {"names": names, "loss": loss, "same": same, "runs": ByPosition.runs}


def _is_local(name: str, blocks: list[str], rank: int) -> bool:
    if name.startswith("blocks."):
        return name.startswith(tuple(f"{block}." for block in blocks))
    return name.startswith("embedding" if rank == 0 else "head")


def test_a_script_of_nxd_runs_with_its_arguments_and_the_recipe() -> None:
    first, second = run_ranks(2, over_two_ranks)
    assert first["names"] == ["blocks.0", "blocks.1"]
    assert second["names"] == ["blocks.2", "blocks.3"]
    model, batch = model_and_batch()
    with torch.no_grad():
        loss = torch.stack([model(part) for part in batch.chunk(2)]).mean()
    assert torch.equal(first["loss"], loss)
    assert torch.equal(second["loss"], loss)
    assert first["same"]
    assert second["same"]
    # Two steps of two microbatches, each run twice, in two layers.
    assert first["runs"] == second["runs"] == 16


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


def test_an_unknown_leaf_is_told_by_a_warning(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        NxDPPModel(Model(), "Block", leaf_module_cls=["LlamaRMSNorm", "Linear"])
    (record,) = [record for record in caplog.records if "leaf_module_cls" in record.message]
    assert "'LlamaRMSNorm', and no module of Model is of such a class" in record.message


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


def test_parallel_state_moves_a_model(one_rank: None) -> None:
    model = nn.Linear(2, 2)
    vars(model.weight)["tensor_model_parallel"] = True
    parallel_state.move_model_to_device(model, "cpu")
    assert vars(model.weight)["tensor_model_parallel"]
    with pytest.raises(ValueError, match="meta"):
        parallel_state.move_model_to_device(nn.Linear(2, 2, device="meta"), "cpu")
