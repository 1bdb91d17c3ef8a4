"""Each collective call is on the board, so that ranks in different calls are told apart."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nxdpp import NxDPPModel, parallel_state, save_pretrained
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults.board import Call, board
from tests.support.models import make, padded_batch

CASES: dict[str, Callable[[NxDPPModel, Path], Any]] = {
    "run_train": lambda wrapped, _: wrapped.run_train(**padded_batch(4)),
    "run_eval": lambda wrapped, _: wrapped.run_eval(**padded_batch(4)),
    "train_samples": lambda wrapped, _: wrapped.steps.train_samples([padded_batch(2)] * 2),
    "eval_samples": lambda wrapped, _: wrapped.steps.eval_samples([padded_batch(2)] * 2),
    "train_microbatches": lambda wrapped, _: wrapped.steps.train_microbatches([padded_batch(2)] * 2),
    "eval_microbatches": lambda wrapped, _: wrapped.steps.eval_microbatches([padded_batch(2)] * 2),
    "average_gradients": lambda wrapped, _: wrapped.steps.average_gradients(),
    "move_model_to_device": lambda wrapped, _: wrapped.move_model_to_device(),
    "save_pretrained": lambda wrapped, folder: save_pretrained(wrapped, folder),
    "an exchange of all ranks": lambda *_: [Exchange().gather(1), Exchange().from_first(lambda: 1)],
    "a construction with partition='profiled'": lambda *_: NxDPPModel(
        make("llama", layers=2), num_microbatches=2, partition="profiled", partition_batch=padded_batch(2)
    ),
}

TRAINING_STEPS = ("run_train", "train_samples", "train_microbatches")


@pytest.fixture(scope="module")
def wrapped() -> Iterator[NxDPPModel]:
    parallel_state.initialize_model_parallel()
    yield NxDPPModel(make("llama", layers=2), num_microbatches=2)
    parallel_state.destroy_model_parallel()


@pytest.fixture
def outermost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that are no part of another one, in order."""
    names: list[str] = []
    enter = Call.__enter__

    def noted(self: Call) -> Call:
        if not board.position().call:
            names.append(self.name)
        return enter(self)

    monkeypatch.setattr(Call, "__enter__", noted)
    return names


@pytest.mark.parametrize("name", CASES)
def test_a_collective_call_is_on_the_board(
    name: str, wrapped: NxDPPModel, outermost: list[str], tmp_path: Path
) -> None:
    before = board.training_steps()
    CASES[name](wrapped, tmp_path / "saved")
    assert set(outermost) == {name}

    # The replicas compare this number before they average.
    assert board.training_steps() - before == (name in TRAINING_STEPS)
