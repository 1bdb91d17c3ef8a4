"""``requires_grad`` and ``training`` of any module, which forward's code reads, changed between two steps."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import (
    VOCABULARY,
    WIDTH,
    PipelinedTraining,
    Plain,
    Script,
    Training,
    compare,
)
from tests.support.run_ranks import run_ranks


class ReadsMode(Plain):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().before_layers(ids)
        return hidden if self.layers[0].training else hidden * 2


class ReadsTrained(Plain):
    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().after_layers(hidden)
        return hidden if self.head.weight.requires_grad else hidden * 2


class ReadsHidden(Plain):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().before_layers(ids)
        return hidden if hidden.requires_grad else hidden * 2


def mode_of_a_layer(training: Training) -> None:
    for mode in (True, False, True):
        training.model.get_submodule("layers.0").train(mode)
        training.steps(1)


def unfreezing(name: str) -> Script:
    def script(training: Training) -> None:
        for trained in (True, False, True):
            training.model.get_submodule(name).requires_grad_(trained)
            training.steps(1)

    return script


def replace_head(training: Training) -> None:
    training.model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def new_head_frozen(training: Training) -> None:
    training.steps(1)
    replace_head(training)
    training.steps(1)
    unfreezing("head")(training)


def frozen_on_its_ranks(part: str) -> Script:
    """Freeze what no code asks for, by names that each rank lists of its own parameters."""

    def script(training: Training) -> None:
        training.steps(1)
        for trained in (False, True, False):
            for name, parameter in training.wrapped.named_parameters():
                if part in name:
                    parameter.requires_grad_(trained)
            training.steps(1)

    return script


SCRIPTS: dict[str, Any] = {
    "mode of a layer": (ReadsMode, mode_of_a_layer),
    "embedding frozen, hidden states": (ReadsHidden, unfreezing("embed")),
    "new head frozen": (ReadsTrained, new_head_frozen),
    "embedding frozen on its rank, which no code asks for": (ReadsTrained, frozen_on_its_ranks("embed")),
}


def compared(rank: int) -> dict[str, Any]:
    return compare(rank, 2, SCRIPTS)


def test_losses_are_those_of_one_process() -> None:
    for result in run_ranks(2, compared):
        for name, (alone, pipelined) in result.items():
            assert pipelined == alone, name


def freeze_on_own_rank(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(ReadsTrained())
    training.steps(1)
    for name, parameter in training.wrapped.named_parameters():
        if name.startswith("head"):
            parameter.requires_grad_(False)
    training.steps(1)


def test_a_change_of_one_rank_that_other_ranks_need_is_named() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, freeze_on_own_rank)
    shown = str(raised.value)
    assert "has other modes, which the code of forward reads, than pipeline rank 0" in shown
    assert "requires_grad of head.weight: False" in shown
    assert "model.head.requires_grad_(False)" in shown
    assert "refreshed, moved or loaded" not in shown
