"""``PipelineTrainer`` of a mixture whose experts are divided: the logs and files of ``Trainer`` in one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralForCausalLM, Trainer

from nxdpp import expert_parallelize, parallel_state
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.test_trainer import Logs, assert_alike, without
from tests.doors.transformers.trainings import EVALUATED, LAYERS, Rows, Training
from tests.support.models import make
from tests.support.run_ranks import run_ranks

REPLICAS = 2
AUXILIARY = 0.5


class LabelledRows(Rows):
    """Rows with as many labels each: a mean over batches of the same rows is the mean over labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def mixture(with_routers: bool, divided: bool = False) -> nn.Module:
    """A mixture, ``with_routers`` whose auxiliary loss is in its loss, and whose experts may be ``divided``."""
    model: MixtralForCausalLM = make("mixtral", layers=LAYERS)
    model.config.output_router_logits = with_routers
    model.router_aux_loss_coef = AUXILIARY
    return expert_parallelize(model) if divided else model


def training(with_routers: bool, **args: Any) -> Training:
    args = {**EVALUATED, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3, **args}
    return Training(args, model=partial(mixture, with_routers), given={"eval_dataset": LabelledRows(8, seed=1)})


def train(rank: int, folder: Path, pipeline: int, with_routers: bool, fsdp: bool) -> tuple[Logs, Logs]:
    """Train, and train again from a checkpoint on; return the logs of both."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=REPLICAS)
    own = training(with_routers, fsdp=fsdp, save_strategy="steps", save_steps=2)
    with pytest.raises(
        ValueError, match=r"expert_model_parallel_size=2, and MixtralForCausalLM has no divided experts"
    ):
        own.trainer(PipelineTrainer, folder / "undivided")
    own = replace(own, model=partial(mixture, with_routers, divided=True))
    logs = []
    for name in ("first", "again"):
        trainer: Any = own.trainer(PipelineTrainer, folder / name)
        assert any(map(is_of_experts, trainer.pipelined.local_parameters()))
        trainer.train(resume_from_checkpoint=str(folder / "first/checkpoint-2") if name == "again" else None)
        logs.append(trainer.state.log_history)
    trainer.save_model(str(folder / "model"))
    return logs[0], logs[1]


@pytest.mark.parametrize(("pipeline", "with_routers", "fsdp"), [(1, False, False), (2, True, False), (1, True, True)])
def test_divided_experts_train_as_one_process(pipeline: int, with_routers: bool, fsdp: bool, tmp_path: Path) -> None:
    runs = run_ranks(REPLICAS * pipeline, train, tmp_path, pipeline, with_routers, fsdp)

    with TemporaryDirectory() as folder:
        # A replica's auxiliary loss of an evaluation is that of its own batch.
        one = training(with_routers, per_device_eval_batch_size=1).trainer(Trainer, Path(folder), REPLICAS)
        one.train()
    for first, again in runs:
        assert_alike(first, one.state.log_history)
        assert_alike(without("train_loss", again), without("train_loss", one.state.log_history))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(one.model, nn.Module)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, atol=1e-6, rtol=0)
