"""Losses, norms and metrics of a reward model's training are those of TRL in one process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from nxdpp.integrations import PipelineRewardTrainer
from tests.doors.transformers.test_trainer import Logs, assert_alike, without
from tests.doors.transformers.trainings import take_device_of_ranks
from tests.doors.trl.tunings import lora, pairs, tokenizer
from tests.support.models import llama
from tests.support.run_ranks import run_ranks


def with_margins(rows: int) -> Dataset:
    return pairs(rows).add_column("margin", [0.25 * (row % 3) for row in range(rows)])


def uneven(rows: int) -> Dataset:
    """Pairs that fill no last batch."""
    return pairs(rows - 1)


CASES: dict[str, tuple[Callable[[int], Dataset], Mapping[str, Any]]] = {
    "margins": (with_margins, {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}),
    "adapters": (
        uneven,
        {"peft_config": True, "dataloader_drop_last": True, "center_rewards_coefficient": 0.1, "fsdp": True},
    ),
}


def trainer(folder: Path, name: str, cls: Any, **pipeline: Any) -> Any:
    take_device_of_ranks()
    torch.manual_seed(0)
    config: Any = llama(2).config
    config.num_labels = 1
    data, more = CASES[name]
    fields: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "learning_rate": 1e-3,
    }
    left_out = {"peft_config", *(["fsdp"] if cls is RewardTrainer else [])}
    args = RewardConfig(str(folder), **fields | {key: value for key, value in more.items() if key not in left_out})
    given: dict[str, Any] = {"train_dataset": data(12), "eval_dataset": data(7), "processing_class": tokenizer()}
    if "peft_config" in more:
        adapter = lora()
        adapter.task_type = "SEQ_CLS"
        given["peft_config"] = adapter
    return cls(LlamaForSequenceClassification(config), args=args, **given, **pipeline)


def train(rank: int, folder: Path) -> dict[str, Logs]:
    logs = {}
    for name in CASES:
        tuned = trainer(folder / name, name, PipelineRewardTrainer, pipeline_parallel_size=2)
        tuned.train()
        logs[name] = tuned.state.log_history
        if name == "margins":
            tuned.save_model(str(folder / "saved"))
            again = trainer(folder / name, name, PipelineRewardTrainer, pipeline_parallel_size=2)
            again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
            logs["resumed"] = again.state.log_history
    with pytest.raises(ValueError, match="cannot honour compute_metrics"):
        trainer(folder / "refused", "margins", PipelineRewardTrainer, compute_metrics=print)
    return logs


def test_a_reward_model_trains_as_in_one_process(tmp_path: Path) -> None:
    ours = run_ranks(2, train, tmp_path)
    for name in CASES:
        one = trainer(tmp_path / "one" / name, name, RewardTrainer)
        one.train()
        for of_rank in ours:
            assert_alike(of_rank[name], one.state.log_history)
        if name == "margins":
            saved = LlamaForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
            torch.testing.assert_close(saved, dict(one.model.state_dict()), atol=5e-6, rtol=0)
    for of_rank in ours:
        # TRL counts the tokens of each call of train.
        again, first = (without("num_tokens", of_rank[each][:-1]) for each in ("resumed", "margins"))
        assert_alike(again, first)
