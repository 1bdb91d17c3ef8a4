"""Layers inside a wrapper of torch: ``checkpoint_wrapper`` and ``torch.compile``."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from nxdpp.tracing.modules import listings
from tests.support.in_process import InProcessPipeline
from tests.support.models import gradient_differences, make, microbatches, padded_batch, train_in_one_process
from tests.support.plain_models import Base, Block
from tests.support.run_ranks import run_ranks

Wrap = Callable[[nn.Module], Any]
compiled: Wrap = functools.partial(torch.compile, backend="aot_eager")
checkpointed: Wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
WRAPS: dict[str, Wrap] = {"reentrant": checkpoint_wrapper, "compile": compiled}
WRAPS["both"] = lambda block: checkpointed(compiled(block))


class Model(Base):
    """Three blocks, each inside a wrapper."""

    def __init__(self, wrap: Wrap, block: Callable[[], nn.Module] = Block) -> None:
        torch.manual_seed(0)
        super().__init__(lambda: wrap(block()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ask for a number that follows from the sizes of the input."""
        return self.run(x) * int(len(x) ** 0.5)


def check_training(model: nn.Module, layer_class: Any, layers: list[str]) -> None:
    whole = copy.deepcopy(model)
    pipeline = InProcessPipeline(model, 2, {"x": torch.randn(4, 4)}, transformer_layer_cls=layer_class)
    assert pipeline.partition.layers == layers
    # Dynamo leaves functions in the layers' Python module when they first run, which a second trace reads.
    for rows in (4, 8):
        batch = {"x": torch.randn(rows, 4)}
        losses = pipeline.train(batch, 2)
        for part, loss in zip(microbatches(batch, 2), losses, strict=True):
            expected = whole(**part)
            (expected / 2).backward()
            assert torch.equal(expected, loss)
    names = {name for name, _ in nn.Module.named_parameters(whole)}
    assert pipeline.partition.owners.keys() >= names
    for ours, theirs in zip(listings.parameters(model), listings.parameters(whole), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


LAYERS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("wrap", "layer_class"),
    [("reentrant", "CheckpointWrapper"), ("compile", "OptimizedModule"), ("both", Block)],
)
def test_wrapped_layers(wrap: str, layer_class: Any) -> None:
    check_training(Model(WRAPS[wrap]), layer_class, LAYERS)


def test_a_compiled_model_is_refused() -> None:
    model = compiled(Model(lambda block: block))
    with pytest.raises(ValueError, match=r"nxdpp.apply_compile\(wrapped\)"):
        InProcessPipeline(model, 2, {"x": torch.randn(4, 4)}, transformer_layer_cls=Block)


def wrapped_llama() -> Any:
    """A Llama with compiled layers in checkpoints."""
    model = make("tied_llama")
    model.config.use_cache = False
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = WRAPS["both"](layer)
    return model


def train_and_save(rank: int, folder: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = wrapped_llama()
    whole = copy.deepcopy(model)
    pipelined = NxDPPModel(model, num_microbatches=2)
    pipelined.move_model_to_device()
    batch = padded_batch(4)
    pipelined.run_train(**batch)
    train_in_one_process(whole, batch, 2)
    differences = gradient_differences(pipelined, whole)
    names = [name for name, _ in pipelined.named_parameters()]
    state = list(pipelined.local_state_dict())

    load_pretrained(pipelined, folder / "one process")
    expected = torch.load(folder / "values.pt")
    plain = {name.replace("_orig_mod.", ""): value for name, value in pipelined.local_state_dict().items()}
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in plain.items())
    save_pretrained(pipelined, folder / "pipeline")
    return {"names": names, "state": state, "differences": differences}


def test_a_llama_with_wrapped_layers(tmp_path: Path) -> None:
    plain = make("tied_llama")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    plain.save_pretrained(tmp_path / "one process")
    torch.save(plain.state_dict(), tmp_path / "values.pt")

    ranks = run_ranks(2, train_and_save, tmp_path)

    model = wrapped_llama()
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    names = {each for rank in ranks for each in rank["names"]} - tied
    assert names == {each for each, _ in model.named_parameters()} - tied
    assert {each for rank in ranks for each in rank["state"]} == set(model.state_dict())
    for rank in ranks:
        assert len(rank["names"]) > 9
        assert rank["differences"].keys() <= tied
    loaded = type(plain).from_pretrained(tmp_path / "pipeline")
    for each, value in loaded.state_dict().items():
        assert torch.equal(value, plain.state_dict()[each])
