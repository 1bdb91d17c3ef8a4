"""Collators and data sets draw the same numbers on all ranks, whatever the stages draw."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.test_trainer import Logs, assert_alike
from tests.doors.transformers.trainings import LAYERS, RandomRows, Training
from tests.support.models import gpt2
from tests.support.run_ranks import run_ranks

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "accelerator_config": {"use_seedable_sampler": False}}
DRAWN = Training(EVALUATED, given={"train_dataset": RandomRows(20), "eval_dataset": RandomRows(7, seed=1)})
WITH_DROPOUT = replace(
    DRAWN,
    args={**EVALUATED, "save_strategy": "epoch", "logging_steps": 1},
    model=partial(gpt2, LAYERS, dropout=0.1),
)


def _trained(training: Training, cls: type[Trainer], folder: Path) -> Trainer:
    trainer = training.trainer(cls, folder)
    trainer.train()
    # Each continues the numbers of the one before; a seed begins them anew.
    trainer.evaluate()
    trainer.evaluate()
    torch.manual_seed(5)
    trainer.evaluate()
    return trainer


def train(rank: int, folder: Path) -> dict[str, Logs]:
    logs = {}
    logs["drawn"] = _trained(DRAWN, PipelineTrainer, folder / "drawn").state.log_history
    logs["dropout"] = _trained(WITH_DROPOUT, PipelineTrainer, folder / "dropout").state.log_history
    again = WITH_DROPOUT.trainer(PipelineTrainer, folder / "again")
    again.train(resume_from_checkpoint=str(folder / "dropout" / "checkpoint-3"))
    logs["again"] = again.state.log_history
    return logs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Logs]]:
    return run_ranks(2, train, tmp_path_factory.mktemp("drawn"))


def test_rows_are_drawn_as_in_one_process(ranks: list[dict[str, Logs]], tmp_path: Path) -> None:
    expected = _trained(DRAWN, Trainer, tmp_path).state.log_history
    for logs in ranks:
        assert_alike(logs["drawn"], expected)


def test_stages_with_dropout_take_the_same_rows(ranks: list[dict[str, Logs]]) -> None:
    # A step compares the rows of the ranks, and raises for others.
    first, second = (logs["dropout"] for logs in ranks)
    assert_alike(second, first)


def test_a_resumed_training_draws_the_same_rows(ranks: list[dict[str, Logs]]) -> None:
    def steps(logs: Logs) -> list[Any]:
        return [(each["step"], each.get("loss"), each.get("eval_loss")) for each in logs if "train_runtime" not in each]

    for logs in ranks:
        whole, again = steps(logs["dropout"]), steps(logs["again"])
        assert whole[: len(again)] == again
