"""Collators and data sets draw the same numbers on all ranks, whatever the stages draw."""

from pathlib import Path

import torch
from transformers import Trainer

from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.test_trainer import Logs, assert_alike
from tests.doors.transformers.trainings import RandomRows, Training
from tests.support.run_ranks import run_ranks

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "accelerator_config": {"use_seedable_sampler": False}}
DRAWN = Training(EVALUATED, given={"train_dataset": RandomRows(20), "eval_dataset": RandomRows(7, seed=1)})


def _trained(cls: type[Trainer], folder: Path) -> Logs:
    trainer = DRAWN.trainer(cls, folder)
    trainer.train()
    # Each continues the numbers of the one before; a seed begins them anew.
    trainer.evaluate()
    trainer.evaluate()
    torch.manual_seed(5)
    trainer.evaluate()
    return trainer.state.log_history


def train(rank: int, folder: Path) -> Logs:
    return _trained(PipelineTrainer, folder)


def test_rows_are_drawn_as_in_one_process(tmp_path: Path) -> None:
    expected = _trained(Trainer, tmp_path / "one")
    for logs in run_ranks(2, train, tmp_path):
        assert_alike(logs, expected)
