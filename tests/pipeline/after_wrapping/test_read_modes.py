"""``requires_grad`` and ``training`` of any module, which forward's code reads, changed between two steps."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import PipelinedTraining, Plain, Script, Training, compare
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


SCRIPTS: dict[str, Any] = {
    "mode of a layer": (ReadsMode, mode_of_a_layer),
    "head frozen": (ReadsTrained, unfreezing("head")),
    "embedding frozen, hidden states": (ReadsHidden, unfreezing("embed")),
    "embedding frozen, gradients set": (SetsGradients, unfreezing("embed")),
    "embedding frozen at first": (SetsGradients, frozen_at_first),
    "embedding frozen at first, hidden states": (ReadsHidden, frozen_at_first),
}


def compared(rank: int, world_size: int) -> dict[str, Any]:
    return compare(rank, world_size, SCRIPTS)


@pytest.mark.parametrize("world_size", [2, 4])
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
