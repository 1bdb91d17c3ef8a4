"""Loads in one layout of ranks of checkpoints that another has saved, to the bit."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nxdpp import NxDPPModel, parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.checkpoint.distributed.layouts import Layout, copy_through, tensors_in, train_and_save
from tests.support import tied_parallel_model
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make
from tests.support.tied_parallel_model import TiedLayer, TiedModel

INTERLEAVED = {"virtual_pipeline_size": 2, "schedule": "interleaved"}
ONE = Layout()
MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied llama": partial(make, "llama", num_hidden_layers=4, tie_word_embeddings=True),
}


def _half() -> nn.Module:
    model: nn.Module = make("llama").to(torch.bfloat16)
    return model


class Scaled(nn.Module):
    """A norm with a scale that has no dimensions, as that of CLIP."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.norm(x) * self.scale
        return scaled


def _scaled() -> Any:
    model = make("mixtral")
    model.model.norm = Scaled(model.model.norm)
    return model


MODELS |= {"bfloat16 llama": _half, "mixtral": _scaled}

# The layouts of two and of four ranks, with the models that go through them one after another.
OF_TWO: Sequence[tuple[Layout, Sequence[str]]] = (
    (Layout(1, 2), ("mixtral",)),
    (Layout(1, 1, True), ("bfloat16 llama",)),
    (Layout(2, 1, False, {"pipeline_cuts": ["model.layers.0"]}), ("tied llama",)),
    (Layout(shards=2), ("bfloat16 llama",)),
)
OF_FOUR: Sequence[tuple[Layout, Sequence[str]]] = (
    (Layout(2, 2), tuple(MODELS)),
    (Layout(2, 1, True), ("tied llama", "mixtral")),
    (Layout(2, 1, False, INTERLEAVED), ("tied llama",)),
    (Layout(1, 2, True), ("mixtral", "bfloat16 llama")),
    (Layout(1, 2, shards=2), ("bfloat16 llama",)),
    (Layout(2, shards=2), ("tied llama",)),
)


def _batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(0, VOCABULARY, (8, 6), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def _train(rank: int, path: Path) -> None:
    parallel_state.initialize_model_parallel()
    for name, model in MODELS.items():
        train_and_save(model, _batches(2), ONE, path / name)


def _copies(rank: int, path: Path, layouts: Sequence[tuple[Layout, Sequence[str]]], sources: dict[str, str]) -> None:
    sizes = None
    for layout, names in layouts:
        if sizes != (layout.tensor, layout.pipeline, layout.shards):
            if sizes is not None:
                parallel_state.destroy_model_parallel()
            sizes = layout.tensor, layout.pipeline, layout.shards
            parallel_state.initialize_model_parallel(*sizes[:2], data_parallel_shard_size=layout.shards or None)
        for name in names:
            copy_through(MODELS[name], layout, path / name, sources[name])
            sources[name] = str(layout)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each model, in which each layout has saved what it loaded of the one before."""
    path: Path = tmp_path_factory.mktemp("layouts")
    run_ranks(1, _train, path)
    sources = dict.fromkeys(MODELS, str(ONE))
    run_ranks(2, _copies, path, OF_TWO, sources)
    sources |= {name: str(layout) for layout, names in OF_TWO for name in names}
    run_ranks(4, _copies, path, OF_FOUR, sources, timeout=240.0)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_loads_what_another_has_saved(name: str, checkpoints: Path) -> None:
    expected_document, expected = tensors_in(checkpoints / name / str(ONE))
    for layout in (layout for layout, names in (*OF_TWO, *OF_FOUR) if name in names):
        document, tensors = tensors_in(checkpoints / name / str(layout))
        assert set(tensors) == set(expected), layout
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[key]), (layout, key)
        for part in ("ties", "optimizer", "scheduler", "user_content"):
            assert document.content[part] == expected_document.content[part], (layout, part)


# Sizes of tensor parallelism and pipeline.
PARTS = (2, 1), (4, 1), (2, 2), (1, 1)


def _parts(rank: int, path: Path) -> None:
    """Layers of NeuronX Distributed: a padded, tied vocabulary, and key-value heads that ranks copy."""
    ids = torch.randint(tied_parallel_model.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    for number, sizes in enumerate(PARTS):
        parallel_state.initialize_model_parallel(*sizes)
        torch.manual_seed(0)
        model = NxDPPModel(TiedModel(True), TiedLayer, num_microbatches=2, use_zero1_optimizer=number % 2 == 1)
        model.move_model_to_device()
        own = model.local_parameters()
        optimizer = Zero1Optimizer(own, AdamW, grad_clipping=False) if number % 2 else AdamW(own)
        if number:
            load_checkpoint(path, str(number - 1), model, optimizer)
        else:
            model.run_train(ids=ids)
            optimizer.step()
        save_checkpoint(path, str(number), model, optimizer)
        parallel_state.destroy_model_parallel()


def test_parts_that_are_padded_and_copied_are_those_of_every_layout(tmp_path: Path) -> None:
    run_ranks(4, _parts, tmp_path)
    document, expected = tensors_in(tmp_path / "0")
    assert expected["model.embed.weight"].shape == (tied_parallel_model.VOCABULARY, tied_parallel_model.HIDDEN)
    assert expected["optimizer.embed.weight.exp_avg"].count_nonzero()
    assert document.content["ties"] == {"head.weight": "embed.weight"}
    for number in range(1, len(PARTS)):
        again, found = tensors_in(tmp_path / str(number))
        assert again.content["optimizer"] == document.content["optimizer"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
