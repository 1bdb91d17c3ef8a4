"""The programs of the pages about checkpoints resume to the bit in a new process, with shuffling and dropout."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from tests.docs.pages import GUIDE, ROOT, blocks
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

Weights = dict[str, torch.Tensor]


def _program(page: Path) -> str:
    return next(block.text for block in blocks(page) if block.language == "python")


def recipe(rank: int, folder: Path, trainings: dict[str, int]) -> list[tuple[list[float], Weights]]:
    """The guide's program to each of the steps in ``trainings``, by their folders: losses and this rank's weights."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    # Its last lines call train: the text before them is the program as it is printed.
    exec(_program(GUIDE / "checkpoints.md").partition("\n_, whole = ")[0], names)
    trained = [names["train"](name, last) for name, last in trainings.items()]
    return [(losses, dict(model.state_dict())) for model, losses in trained]


def test_a_new_process_resumes_the_recipe_to_the_bit(tmp_path: Path) -> None:
    """An epoch has 5 steps: the checkpoints are of steps 2 and 4 inside of the first, and of 10 at the second's end."""
    first = run_ranks(2, recipe, tmp_path, {"whole": 12, "early": 3, "late": 11})
    second = run_ranks(2, recipe, tmp_path, {"early": 12, "late": 12})
    for (whole, *_), resumed in zip(first, second, strict=True):
        for losses, weights in resumed:
            assert len(losses) == (10 if losses is resumed[0][0] else 2)
            assert losses == whole[0][-len(losses) :]
            assert all(torch.equal(weights[name], value) for name, value in whole[1].items())


class Stopped(Exception):
    """The end of a training in the middle."""


def _train_until(stop: int | None, train: Callable[..., None], folder: Path) -> tuple[list[float], Weights]:
    """Losses and this rank's weights after ``train``, which ends before its step ``stop``."""
    torch.manual_seed(0)
    model = NxDPPModel(dropping(), num_microbatches=2, broadcast_and_average_loss=True)
    run_train, losses = model.run_train, list[float]()

    def run(**inputs: torch.Tensor) -> None:
        if len(losses) == stop:
            raise Stopped
        losses.append(run_train(**inputs).item())

    vars(model)["run_train"] = run
    texts = torch.randint(128, (12, 16), generator=torch.Generator().manual_seed(0))
    with contextlib.suppress(Stopped):
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), texts, folder, epochs=3)
    return losses, dict(model.state_dict())


def dropping() -> LlamaForCausalLM:
    """A tiny Llama with attention dropout."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, attention_dropout=0.1, **sizes))


def stateful(rank: int, folder: Path, stops: dict[str, int | None]) -> list[tuple[list[float], Weights]]:
    """The program with a ``StatefulDataLoader``, once for each of ``stops``, by their folders."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    names: dict[str, Any] = {}
    exec(_program(ROOT / "docs" / "checkpoints.md"), names)
    return [_train_until(stop, names["train"], folder / name) for name, stop in stops.items()]


def test_a_stateful_loader_resumes_to_the_bit(tmp_path: Path) -> None:
    """An epoch has 3 steps: the stops are inside of the second one, and at its end."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is no requirement of nxdpp")
    first = run_ranks(2, stateful, tmp_path, {"whole": None, "early": 4, "late": 6})
    second = run_ranks(2, stateful, tmp_path, {"early": None, "late": None})
    for (whole, *_), resumed in zip(first, second, strict=True):
        for losses, weights in resumed:
            assert len(losses) == (5 if losses is resumed[0][0] else 3)
            assert losses == whole[0][-len(losses) :]
            assert all(torch.equal(weights[name], value) for name, value in whole[1].items())
