"""Figures of the last step: seconds of the step and of each action."""

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support.plain_models import WIDTH, Base, Block
from tests.support.run_ranks import run_ranks

ROWS, MICROBATCHES = 6, 3


class Straight(Base):
    """Four blocks, for four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def of_both(rank: int) -> tuple[list[str], list[str]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return actions_of("1f1b"), actions_of("zb-v")


def actions_of(schedule: str) -> list[str]:
    """The actions of a training step, whose seconds add up to the busy share."""
    model = NxDPPModel(Straight(), Block, num_microbatches=MICROBATCHES, schedule=schedule)
    assert (model.last_step_seconds, model.last_action_seconds) == (0.0, {})
    for _ in range(2):
        model.run_train(x=torch.rand(ROWS, WIDTH))
    actions = model.last_action_seconds
    assert all(seconds > 0.0 for seconds in actions.values())
    assert sum(actions.values()) == pytest.approx(model.last_busy_share * model.last_step_seconds)
    return list(actions)


def test_actions_of_each_rank() -> None:
    (first, first_of_v), (last, _) = run_ranks(2, of_both)
    assert first == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert last == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert sorted({action[:2] for action in first_of_v}) == ["0F", "0I", "0W", "3F", "3I", "3W"]
