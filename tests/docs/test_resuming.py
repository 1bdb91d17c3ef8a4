"""The programs of the pages about checkpoints resume to the bit, with shuffling and dropout.

Each part of a training is a start of its own: the program of the page, then a line that calls it by ``recipe`` or
``stateful`` of this file.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from tests.docs.pages import GUIDE, ROOT, blocks
from tests.docs.torchrun import run_forked

Weights = dict[str, torch.Tensor]
RANKS = 2


def _program(page: Path) -> str:
    return next(block.text for block in blocks(page) if block.language == "python")


def _of_ranks(program: str, call: str, folder: Path, name: str) -> list[list[tuple[list[float], Weights]]]:
    """What each rank of a start has written, which runs ``program`` and then ``call`` in the folder of all starts."""
    file = folder / name / "train.py"
    file.parent.mkdir(parents=True)
    start = f"import os\n\nos.chdir({str(folder)!r})\n{program}\nfrom tests.docs import test_resuming\n"
    file.write_text(f"{start}test_resuming.{call}")
    ended = run_forked(file, RANKS)
    assert ended.status == 0, ended.account
    return [torch.load(folder / f"rank {rank}") for rank in range(RANKS)]


def _write(trained: list[tuple[list[float], nn.Module]]) -> None:
    parts = [(losses, {key: value.clone() for key, value in model.state_dict().items()}) for losses, model in trained]
    torch.save(parts, f"rank {dist.get_rank()}")


def _assert_resumed(first: list[Any], second: list[Any], lengths: tuple[int, int]) -> None:
    for (whole, *_), resumed in zip(first, second, strict=True):
        assert tuple(len(losses) for losses, _ in resumed) == lengths
        for losses, weights in resumed:
            assert losses == whole[0][-len(losses) :]
            assert all(torch.equal(weights[name], value) for name, value in whole[1].items())


def recipe(train: Callable[..., Any], trainings: Mapping[str, int]) -> None:
    """Run the guide's ``train`` to each of the steps in ``trainings``, by their folders."""
    trained = [train(name, last) for name, last in trainings.items()]
    _write([(losses, model) for model, losses in trained])


def test_a_new_process_resumes_the_recipe_to_the_bit(tmp_path: Path) -> None:
    """An epoch has 5 steps: the checkpoints are of steps 2 and 4 inside of the first, and of 10 at the second's end."""
    # Its last lines call train: the text before them is the program as it is printed.
    program = _program(GUIDE / "checkpoints.md").partition("\n_, whole = ")[0]
    first = _of_ranks(program, "recipe(train, {'whole': 12, 'early': 3, 'late': 11})", tmp_path, "first")
    second = _of_ranks(program, "recipe(train, {'early': 12, 'late': 12})", tmp_path, "second")
    _assert_resumed(first, second, (10, 2))


class StatefulDataLoader(DataLoader[Any]):
    """What the program uses of torchdata's: the state says how many batches of an epoch are done."""

    _first = _done = 0

    def __iter__(self) -> Any:
        self._done, self._first = self._first, 0
        for batch in itertools.islice(super().__iter__(), self._done, None):
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches that are done."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Leave out the batches that are done, in the next epoch alone."""
        self._first = state["done"]


class Stopped(Exception):
    """The end of a training in the middle."""


def _train_until(stop: int | None, train: Callable[..., None], folder: str) -> tuple[list[float], nn.Module]:
    """Losses and the model after ``train``, which ends before its step ``stop``."""
    torch.manual_seed(0)
    model = NxDPPModel(dropping(), num_microbatches=2, broadcast_and_average_loss=True)
    run_train, losses = model.run_train, list[float]()

    def run_or_stop(**inputs: torch.Tensor) -> None:
        if len(losses) == stop:
            raise Stopped
        losses.append(run_train(**inputs).item())

    vars(model)["run_train"] = run_or_stop
    texts = torch.randint(128, (12, 16), generator=torch.Generator().manual_seed(0))
    with contextlib.suppress(Stopped):
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), texts, Path(folder), epochs=3)
    return losses, model


def dropping() -> LlamaForCausalLM:
    """A tiny Llama with attention dropout."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, attention_dropout=0.1, **sizes))


def stateful(train: Callable[..., None], stops: Mapping[str, int | None]) -> None:
    """Run the program with a ``StatefulDataLoader`` once for each of ``stops``, by their folders."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend="gloo")
    _write([_train_until(stop, train, name) for name, stop in stops.items()])


def test_a_stateful_loader_resumes_to_the_bit(tmp_path: Path) -> None:
    """An epoch has 3 steps: the stops are inside of the second one, and at its end."""
    program = _program(ROOT / "docs" / "checkpoints.md")
    if find_spec("torchdata") is None:
        # torchdata is no requirement of nxdpp.
        line = "from torchdata.stateful_dataloader import StatefulDataLoader"
        assert program.count(line) == 1
        program = program.replace(line, "from tests.docs.test_resuming import StatefulDataLoader")
    first = _of_ranks(program, "stateful(train, {'whole': None, 'early': 4, 'late': 6})", tmp_path, "first")
    second = _of_ranks(program, "stateful(train, {'early': None, 'late': None})", tmp_path, "second")
    _assert_resumed(first, second, (5, 3))
