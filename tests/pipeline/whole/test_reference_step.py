"""``check_against_module="first"``: a difference of the first step is an error on every rank, and nothing else is."""

import ctypes
import random
import re
from typing import Any

import numpy
import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.reference_step import _difference
from tests.support import models
from tests.support.models import gradient_differences, padded_batch, reference, train_in_one_process
from tests.support.plain_models import Base, Block
from tests.support.run_ranks import run_ranks

_number = ctypes.c_double(1.0)


class Grows(Block):
    """Changes a number behind Python's back."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ctypes.c_double.from_address(ctypes.addressof(_number)).value += 1
        return super().forward(hidden)


class Hidden(Base):
    """Scales by the number that its blocks change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Grows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.through(self.blocks, self.embedding(x))
        return self.close(hidden * ctypes.c_double.from_address(ctypes.addressof(_number)).value)


def run_hidden(rank: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(Hidden(), Grows, 2, input_names=["x"], check_against_module="first")
    with pytest.raises(RuntimeError) as error:
        wrapped.run_train(x=torch.ones(4, 4))
    return str(error.value)


def test_a_wrong_pipeline_is_found_on_every_rank() -> None:
    messages = run_ranks(2, run_hidden)
    assert messages[0] == messages[1]
    assert "leaf_module_cls" in messages[0]
    assert re.search(r"rank 1: the loss of microbatch 0 has \S+ in the pipeline, \S+ in one process", messages[0])
    assert re.search(r"rank 0: the gradient of embedding.weight has \S+ in the pipeline, \S+ in", messages[0])


def state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in numpy.random.get_state()]


def step(model: Any, batch: dict[str, torch.Tensor], schedule: str, chunks: int, **arguments: Any) -> list[str]:
    """Run a checked step and a second one; return differences from one process. Nothing else may change."""
    whole = reference(model)
    wrapped = NxDPPModel(model, None, 4, chunks, schedule=schedule, check_against_module="first", **arguments)
    wrapped.move_model_to_device()
    different = []
    for _ in range(2):
        before = state()
        wrapped.run_train(**batch)
        different += [] if state() == before else ["generators"]
        train_in_one_process(whole, batch, 4)
        different += [name for name, distance in gradient_differences(wrapped, whole).items() if distance != 0]
    return different


TIED = {"transformer.wte.weight", "lm_head.weight"}
TIED |= {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
CASES = {"gpt2": ("interleaved", 2), "bert": ("zb-v", 1)}
"""By model the schedule, and stages on each rank."""


def train_with_dropout() -> str:
    wrapped = NxDPPModel(models.make("gpt2", dropout=0.1), None, 2, check_against_module="first")
    batch = padded_batch(4)
    wrapped.train()
    with pytest.raises(RuntimeError, match="draws random numbers") as error:
        wrapped.run_train(**batch)
    # The remedy of the message.
    wrapped.eval()
    wrapped.run_train(**batch)
    wrapped.train()
    wrapped.run_train(**batch)
    return str(error.value)


def on_two_ranks(rank: int) -> tuple[dict[str, list[str]], str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    right = {name: step(models.make(name), padded_batch(8), *case) for name, case in CASES.items()}
    return right, train_with_dropout()


def test_right_pipelines_pass_and_dropout_is_refused_with_a_remedy() -> None:
    first, second = run_ranks(2, on_two_ranks)
    for case in (*first[0].values(), *second[0].values()):
        assert set(case) <= TIED
    assert first[1] == second[1]


@pytest.mark.parametrize("is_rounded", [False, True])
def test_what_is_not_finite_must_be_equal_and_hides_no_difference(is_rounded: bool) -> None:
    nan, inf = float("nan"), float("inf")

    def differ(ours: list[float], theirs: list[float]) -> bool:
        return _difference("the loss", torch.tensor(ours), torch.tensor(theirs), is_rounded) is not None

    assert not differ([nan], [nan])
    assert not differ([inf, nan, 1.0], [inf, nan, 1.0])
    assert differ([inf, 1.0], [inf, 2.0])
    assert differ([nan, 1.0], [nan, 2.0])
    assert differ([nan], [1.0])
    assert differ([1.0], [nan])
    assert differ([inf], [-inf])
    assert differ([1.0, 1.0], [1.0, 1.0 + 1e-6]) is not is_rounded
