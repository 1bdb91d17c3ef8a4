"""Transformers models inside modules of the user's own: exact, without any argument."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp.pipeline.stages.loss import pick_loss
from tests.support import wrapped_models as models
from tests.support.in_process import InProcessPipeline
from tests.support.wrapped_models import LAYERS, batch, initialised

MICROBATCHES = 2
TEXT = ("input_ids", "attention_mask")
LABELLED = ("input_ids", "labels")
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "reward head": (models.RewardHead, TEXT, "model.layers"),
    "value head": (models.ValueHead, LABELLED, "pretrained_model.model.layers"),
    "Lightning-like": (models.LightningLike, LABELLED, "model.model.layers"),
    "tuples": (models.Tuples, LABELLED, "model.bert.encoder.layer"),
}


def trained(whole: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Losses of the microbatches in one process; the gradients are in ``whole``."""
    parts = {name: value.chunk(MICROBATCHES) for name, value in inputs.items()}
    losses = [pick_loss(whole(**{n: part[i] for n, part in parts.items()}), None) for i in range(MICROBATCHES)]
    for loss in losses:
        (loss / MICROBATCHES).backward()
    return losses


def check_exact(model: nn.Module, inputs: Mapping[str, Any], stages: int) -> InProcessPipeline:
    """Fail unless losses and gradients are those of one process, bit for bit."""
    whole = copy.deepcopy(model.train())
    pipeline = InProcessPipeline(model, stages)
    losses = pipeline.train(inputs, MICROBATCHES)
    expected = trained(whole, inputs)
    assert all(map(torch.equal, losses, expected))
    theirs = dict(whole.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        gradient = theirs[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        assert gradient is None or (parameter.grad is not None and torch.equal(parameter.grad, gradient)), name
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in theirs.values())
    return pipeline


@pytest.mark.parametrize("case", list(CASES))
def test_a_model_inside_a_module_is_exact(case: str) -> None:
    make, names, layers = CASES[case]

    pipeline = check_exact(initialised(make()), batch(*names), 3)

    assert pipeline.partition.layers == [f"{layers}.{index}" for index in range(LAYERS)]


def test_a_frozen_teacher_is_cut_before_its_student() -> None:
    pipeline = check_exact(
        initialised(models.TeacherWithoutGradients()), batch("input_ids", "attention_mask", "labels"), 3
    )

    assert pipeline.partition.layers == [
        *(f"teacher.model.layers.{index}" for index in range(LAYERS)),
        *(f"student.model.layers.{index}" for index in range(2)),
    ]


def test_two_towers_are_cut_in_the_order_of_execution() -> None:
    pipeline = check_exact(initialised(models.TwoTowers()), batch("input_ids", "pixel_values"), 3)

    assert pipeline.partition.layers == [
        *(f"text.encoder.layer.{index}" for index in range(LAYERS)),
        *(f"vision.layers.{index}" for index in range(LAYERS)),
    ]
