"""Generators without a seed that the spine makes are refused, also if their numbers are only compared."""

import os
import random
import secrets
import tempfile
import uuid
from collections.abc import Callable
from os import urandom
from random import Random
from typing import Any
from uuid import uuid4

import numpy
import pytest
import torch
from torch import Tensor

from nxdpp.tracing.errors import TracingError
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with


class MyRandom(Random):
    """A generator of the user."""


class Model(PlainModel):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.draw() < 1e-9 else hidden


WITHOUT_A_SEED: dict[str, Callable[[], Any]] = {
    "default_rng": lambda: numpy.random.default_rng().random(),
    "Generator": lambda: numpy.random.Generator(numpy.random.PCG64()).random(),
    "RandomState": lambda: numpy.random.RandomState().rand(),
    "SeedSequence": lambda: 1 / (1 + numpy.random.SeedSequence().generate_state(1)[0]),
    "Random": lambda: Random().random(),
    "subclass": lambda: MyRandom().random(),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "urandom": lambda: os.urandom(1)[0],
    "urandom of another name": lambda: urandom(1)[0],
    "uuid4": lambda: uuid.uuid4().int,
    "uuid4 of another name": lambda: uuid4().int,
    "uuid1": lambda: uuid.uuid1().int,
    "secrets": lambda: 1 / (1 + secrets.randbelow(10)),
}


def _trace(draw: Callable[[], Any], tracer: str = "hf") -> None:
    model = Model(draw)
    trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("draw", WITHOUT_A_SEED.values(), ids=WITHOUT_A_SEED)
def test_a_generator_without_a_seed_is_refused(draw: Callable[[], Any], tracer: str) -> None:
    with pytest.raises(TracingError, match=r"drawn once for all steps(.|\n)* at .*test_entropy\.py:\d+, in "):
        _trace(draw, tracer)
    assert draw() >= 0, "the generators are as before"


def seeded() -> float:
    return Random(0).random() + MyRandom("a").random() + float(numpy.random.default_rng(0).random())


def of_the_standard_library() -> float:
    with tempfile.TemporaryDirectory() as directory:
        return float(len(directory))


@pytest.mark.parametrize("draw", [seeded, of_the_standard_library])
def test_other_generators_are_allowed(draw: Callable[[], float]) -> None:
    _trace(draw)
