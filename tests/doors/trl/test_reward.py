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
from tests.doors.trl.tunings import lora, pairs, tokenizer
from tests.support.models import llama
from tests.support.run_ranks import run_ranks


def with_margins(rows: int) -> Dataset:
    return pairs(rows).add_column("margin", [0.25 * (row % 3) for row in range(rows)])


def uneven(rows: int) -> Dataset:
    """Pairs that fill no last batch."""
    return pairs(min(rows, 15))


CASES: dict[str, tuple[Callable[[int], Dataset], Mapping[str, Any]]] = {
    "pairs": (pairs, {"center_rewards_coefficient": 0.1}),
    "margins": (with_margins, {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}),
    "a dropped last batch": (uneven, {"dataloader_drop_last": True}),
    "adapters": (pairs, {"peft_config": True}),
    "shards": (pairs, {"fsdp": True, "eval_strategy": "steps", "eval_steps": 2}),
}


def trainer(folder: Path, name: str, cls: Any, replicas: int = 1, **pipeline: Any) -> Any:
    torch.manual_seed(0)
    config: Any = llama().config
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
        "per_device_train_batch_size": 2 * replicas,
        "per_device_eval_batch_size": 2 * replicas,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "learning_rate": 1e-3,
    }
    left_out = {"peft_config", *(["fsdp"] if cls is RewardTrainer else [])}
    args = RewardConfig(str(folder), **fields | {key: value for key, value in more.items() if key not in left_out})
    given: dict[str, Any] = {"train_dataset": data(24), "eval_dataset": data(7), "processing_class": tokenizer()}
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
        trainer(folder / "refused", "pairs", PipelineRewardTrainer, compute_metrics=print)
    return logs


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_reward_model_trains_as_in_one_process(ranks: int, tmp_path: Path) -> None:
    ours = run_ranks(ranks, train, tmp_path)
    for name in CASES:
        one = trainer(tmp_path / "one" / name, name, RewardTrainer, ranks // 2)
        one.train()
        for of_rank in ours:
            # Each replica pads its rows to the longest of them.
            unlike = "total_flos" if ranks == 4 else "nothing"
            assert_alike(*(without(unlike, each) for each in (of_rank[name], one.state.log_history)))
        if name == "margins":
            saved = LlamaForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
            torch.testing.assert_close(saved, dict(one.model.state_dict()), atol=5e-6, rtol=0)
    for of_rank in ours:
        # TRL counts the tokens of each call of train.
        again, first = (without("num_tokens", of_rank[each][:-1]) for each in ("resumed", "margins"))
        assert_alike(again, first)
