"""Checks of the arguments of the constructor and of a step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.config import PipelineConfig
from tests.support.kept_messages import KeptMessages
from tests.support.models import make
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainLayer, PlainModel


def test_whole_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"num_microbatches": np.int64(4), "virtual_pipeline_size": np.uint8(2)}
    config = PipelineConfig(PlainModel(), **given, partition_memory_limit=np.int32(5))  # type: ignore[arg-type]
    numbers = (config.num_microbatches, config.virtual_pipeline_size, config.partition_memory_limit)
    assert numbers == (4, 2, 5)
    assert {type(number) for number in numbers} == {int}


class OnlyHead(PlainModel):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)


@pytest.mark.usefixtures("one_rank")
def test_a_class_with_its_own_listing_of_parameters_is_warned_of() -> None:
    kept = KeptMessages("listings")
    for model in (OnlyHead(), PlainModel()):
        NxDPPModel(model, PlainLayer)
    (message,) = kept.texts
    assert message.startswith("OnlyHead has its own parameters(), which the wrapped model does not use")


def wrap_few(rank: int) -> list[list[str]]:
    """Wrap models with fewer microbatches than ranks, and with enough; return the warnings."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    kept, found = KeptMessages("a rank waits for others"), []
    for microbatches in (1, 4):
        kept.texts.clear()
        NxDPPModel(make("llama", layers=2), num_microbatches=microbatches)
        found.append([*kept.texts])
    return found


def test_rank_0_warns_of_idle_ranks() -> None:
    (message,), enough = (first := run_ranks(2, wrap_few))[0]
    assert first[1] == [[], []]
    assert message.startswith("num_microbatches=1 on 2 pipeline ranks: a rank waits for others in 50 %")
    assert "to 4 or more" in message
    assert message.endswith("it is 20 %.")
    assert not enough
