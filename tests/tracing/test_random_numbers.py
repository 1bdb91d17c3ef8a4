"""Python's and NumPy's random numbers outside the layers are refused with their line, with every tracer."""

import random
import threading
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy
import pytest
import torch

from nxdpp.tracing.errors import TracingError
from nxdpp.tracing.random_numbers import refused_random_numbers
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.uniform": lambda: uniform(0, 1),
    "numpy.random.rand": lambda: float(numpy.random.rand()),
}


class Skipping(PlainModel):
    """Skips its layers at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 if self.draw() < 0.5 else hidden


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_is_refused(name: str, tracer: str) -> None:
    model = Skipping(DRAWS[name])
    with pytest.raises(TracingError, match=rf"{name} is called outside .*\n  at .*test_random_numbers.py:\d+"):
        trace_with(model, {"x": torch.ones(2, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))
    DRAWS[name]()  # allowed again


def test_other_threads_draw_meanwhile() -> None:
    drawn: list[float] = []
    with refused_random_numbers(PlainModel()):
        thread = threading.Thread(target=lambda: drawn.append(random.random()))
        thread.start()
        thread.join()
    assert len(drawn) == 1


def test_transformers_may_ask_whether_to_drop_a_layer() -> None:
    drawn: dict[str, Any] = {"__name__": "transformers.models.musicgen.modeling_musicgen", "random": random}
    with refused_random_numbers(PlainModel()):
        exec("number = random.uniform(0, 1)", drawn)
    assert 0 <= drawn["number"] <= 1
