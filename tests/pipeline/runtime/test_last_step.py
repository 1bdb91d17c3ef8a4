"""Figures of the last step: bytes sent, seconds of the step and of each action."""

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


Figures = tuple[list[int], list[str]]


def of_both(rank: int) -> tuple[Figures, Figures]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return figures("1f1b"), figures("zb-v")


def figures(schedule: str) -> Figures:
    """Bytes of two training steps, of one after a refresh and of an evaluation; the actions of a training step."""
    model = NxDPPModel(Straight(), Block, num_microbatches=MICROBATCHES, schedule=schedule)
    assert (model.last_sent_bytes, model.last_step_seconds, model.last_action_seconds) == (0, 0.0, {})
    x = torch.rand(ROWS, WIDTH)
    sent = []
    for is_refreshed in (False, False, True):
        if is_refreshed:
            model.refresh()
        model.run_train(x=x)
        sent.append(model.last_sent_bytes)
        actions = model.last_action_seconds
    assert all(seconds > 0.0 for seconds in actions.values())
    assert sum(actions.values()) == pytest.approx(model.last_busy_share * model.last_step_seconds)
    model.run_eval(x=x)
    return [*sent, model.last_sent_bytes], list(actions)


def test_bytes_and_actions_of_each_rank() -> None:
    # One boundary, float32 of (2, WIDTH) for each microbatch: forward from rank 0, back from rank 1.
    one_way = MICROBATCHES * (ROWS // MICROBATCHES) * WIDTH * 4
    (first, first_of_v), (last, last_of_v) = run_ranks(2, of_both)
    assert first == ([one_way] * 4, ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"])
    assert last == ([one_way] * 3 + [0], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"])
    # A V of four stages: stages 1 and 2 are both on rank 1, and nothing is sent between them.
    assert (first_of_v[0], last_of_v[0]) == ([2 * one_way] * 3 + [one_way], [2 * one_way] * 3 + [one_way])
    assert sorted({action[:2] for action in first_of_v[1]}) == ["0F", "0I", "0W", "3F", "3I", "3W"]
