"""``requires_grad`` and ``training`` of any module, which forward's code reads, changed between two steps."""

from collections.abc import Callable
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


class SetsGradients(Plain):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(any(parameter.requires_grad for parameter in self.embed.parameters())):
            return super().before_layers(ids)


class SetsGradientsOfWeight(Plain):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.embed.weight.requires_grad):
            return super().before_layers(ids)


def mode_of_a_layer(training: Training) -> None:
    for mode in (True, False, True):
        training.model.get_submodule("layers.0").train(mode)
        training.steps(2)


def unfreezing(name: str) -> Script:
    def script(training: Training) -> None:
        for trained in (True, False, True):
            training.model.get_submodule(name).requires_grad_(trained)
            training.steps(2)

    return script


def frozen_at_first(training: Training) -> None:
    training.model.get_submodule("embed").requires_grad_(False)
    training.steps(2)
    training.model.get_submodule("embed").requires_grad_(True)
    training.steps(3)


def replace_head(training: Training) -> None:
    training.model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def new_head_frozen(training: Training) -> None:
    training.steps(1)
    replace_head(training)
    training.steps(1)
    unfreezing("head")(training)


def frozen_head_replaced(training: Training) -> None:
    training.model.get_submodule("head").requires_grad_(False)
    training.steps(1)
    replace_head(training)
    training.steps(1)


def frozen_weight_replaced(training: Training) -> None:
    head = training.model.get_submodule("head")
    head.requires_grad_(False)
    training.steps(1)
    head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    training.steps(1)


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


def norms_in_evaluation(training: Training) -> None:
    training.steps(1)
    for mode in (False, True):
        for module in training.wrapped.modules():
            if isinstance(module, nn.LayerNorm):
                module.train(mode)
        training.steps(1)


SCRIPTS: dict[str, Any] = {
    "mode of a layer": (ReadsMode, mode_of_a_layer),
    "head frozen": (ReadsTrained, unfreezing("head")),
    "embedding frozen, hidden states": (ReadsHidden, unfreezing("embed")),
    "embedding frozen, gradients set": (SetsGradients, unfreezing("embed")),
    "embedding frozen, gradients set by its weight": (SetsGradientsOfWeight, unfreezing("embed")),
    "new head frozen": (ReadsTrained, new_head_frozen),
    "frozen head replaced": (ReadsTrained, frozen_head_replaced),
    "frozen weight of the head replaced": (ReadsTrained, frozen_weight_replaced),
    "embedding frozen on its rank": (ReadsTrained, frozen_on_its_ranks("embed")),
    "layers frozen on their ranks": (SetsGradients, frozen_on_its_ranks("linear")),
    "norms in evaluation on their ranks": (ReadsMode, norms_in_evaluation),
    "embedding frozen at first": (SetsGradients, frozen_at_first),
    "embedding frozen at first, hidden states": (ReadsHidden, frozen_at_first),
}


def compared(rank: int, world_size: int) -> dict[str, Any]:
    return compare(rank, world_size, SCRIPTS)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_losses_are_those_of_one_process(world_size: int) -> None:
    for result in run_ranks(world_size, compared, world_size):
        for name, (alone, pipelined) in result.items():
            assert pipelined == alone, name


def one_rank_freezes(rank: int, module: type[Plain], part: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(module())
    training.steps(1)
    for name, parameter in training.wrapped.named_parameters():
        if name.startswith(part):
            parameter.requires_grad_(False)
    training.steps(1)


@pytest.mark.parametrize(("module", "part"), [(ReadsTrained, "head"), (SetsGradients, "embed")])
def test_a_rank_that_changed_them_alone_is_told_so(module: type[nn.Module], part: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, one_rank_freezes, module, part)
    shown = str(raised.value)
    assert "has other modes, which the code of forward reads, than pipeline rank 0" in shown
    assert f"requires_grad of {part}.weight: False" in shown
    assert "model.head.requires_grad_(False)" in shown


def new_head_frozen_by_type(training: PipelinedTraining) -> None:
    training.steps(1)
    replace_head(training)
    training.steps(1)
    for module in training.wrapped.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)


def first_stage_trained_later(training: PipelinedTraining) -> None:
    for name, parameter in training.model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed", "layers.0", "layers.1")))
    training.steps(1)
    for name, parameter in training.wrapped.named_parameters():
        if name.startswith("embed"):
            parameter.requires_grad_(True)


def change_on_own_rank(rank: int, change: Callable[[PipelinedTraining], None]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(ReadsTrained())
    change(training)
    training.steps(1)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (new_head_frozen_by_type, "requires_grad of layers.2.linear.weight: False"),
        (first_stage_trained_later, "requires_grad of embed.weight: False"),
    ],
)
def test_a_change_that_other_ranks_need_is_named(change: Callable[[PipelinedTraining], None], line: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, change_on_own_rank, change)
    shown = str(raised.value)
    assert "has other modes, which the code of forward reads, than pipeline rank 0" in shown
    assert line in shown
    assert "refreshed, moved or loaded" not in shown


def no_code_asks(rank: int) -> list[float]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    training = PipelinedTraining(Plain())
    training.steps(1)
    for name, parameter in training.wrapped.named_parameters():
        parameter.requires_grad_(name.startswith("layers"))
    training.steps(2)
    return training.record


def test_a_rank_may_freeze_what_no_code_asks_for() -> None:
    torch.manual_seed(0)
    alone = Training(Plain())
    alone.steps(1)
    for name, parameter in alone.wrapped.named_parameters():
        parameter.requires_grad_(name.startswith("layers"))
    alone.steps(2)
    assert run_ranks(2, no_code_asks) == [alone.record] * 2
