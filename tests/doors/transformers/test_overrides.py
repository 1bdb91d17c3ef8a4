"""Methods of a subclass mean what they mean for ``Trainer`` in one process, or are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.control_flags import check_flags
from tests.doors.transformers.test_trainer import Logs, assert_alike
from tests.doors.transformers.trainings import EVALUATED, Rows, Training, mean_of_batches
from tests.support.models import VOCABULARY
from tests.support.run_ranks import run_ranks


def _next_token(inputs: dict[str, Any]) -> dict[str, Any]:
    inputs["input_ids"] = (inputs["input_ids"] + 1) % VOCABULARY
    return inputs


class Own(Trainer):
    """Changes the batches of steps and of evaluations, which it runs twice, and makes its own optimizer."""

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
        super().prediction_step(model, inputs, *others, **named)
        return super().prediction_step(model, _next_token(inputs), *others, **named)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [_next_token(dict(batch)) for batch in batches], items

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 100

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        assert isinstance(self.model, nn.Module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self.optimizer


class ChangedBatch(Trainer):
    """Changes the batch that it is given."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        return super().training_step(model, _next_token(inputs), *others)


class EndOfEpoch(TrainerCallback):
    """Ends an epoch after a batch."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_epoch_stop = True


def _trained(base: type[Trainer], folder: Path) -> Logs:
    args = {**EVALUATED, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    training = Training(args, model=mean_of_batches, given={"eval_dataset": Rows(7)})
    trainer = training.trainer(Own if base is Trainer else type("Both", (Own, base), {}), folder)
    trainer.train()
    return trainer.state.log_history


def train(rank: int, folder: Path) -> Logs:
    logs = _trained(PipelineTrainer, folder / "own")
    changed = Training().trainer(type("Both", (ChangedBatch, PipelineTrainer), {}), folder)
    with pytest.raises(ValueError, match="training_step was given another batch than"):
        changed.train()
    ended = Training(given={"callbacks": [EndOfEpoch()]}).trainer(PipelineTrainer, folder)
    with pytest.raises(ValueError, match=r"an epoch, or the training, inside of an optimizer step, 3 batches before"):
        ended.train()
    scaled = Training().trainer(PipelineTrainer, folder)
    scaled.loss_is_scaled_for_ga = False
    with pytest.raises(ValueError, match=r"cannot honour loss_is_scaled_for_ga=False.* Leave it at None"):
        scaled.train()
    check_flags(rank, folder)
    return logs


def test_an_override_is_honoured(tmp_path: Path) -> None:
    expected = _trained(Trainer, tmp_path / "one")
    for logs in run_ranks(2, train, tmp_path):
        assert_alike(logs, expected)
