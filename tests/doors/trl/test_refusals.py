"""What a pipeline's trainer of TRL cannot honour is refused by name: arguments before anything is changed.

Prompt tuning and an auxiliary loss of split batches are refused after TRL's constructor, which tells of them.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import DPOConfig, RewardConfig, SFTConfig

from nxdpp.doors.transformers import arguments
from nxdpp.doors.trl.trainer import REFUSED
from nxdpp.integrations import PipelineDPOTrainer, PipelineRewardTrainer, PipelineSFTTrainer
from nxdpp.ranks import parallel_state
from tests.doors.trl.tunings import pairs, texts, tokenizer
from tests.support.models import llama, mixtral


@pytest.fixture(autouse=True)
def _no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no world and no folder behind: some are refused after TRL's constructor has made them."""
    monkeypatch.chdir(tmp_path)
    yield
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("trainer", "config"),
    [(PipelineSFTTrainer, SFTConfig), (PipelineDPOTrainer, DPOConfig), (PipelineRewardTrainer, RewardConfig)],
)
def test_each_field_is_honoured_or_refused(trainer: Any, config: Any) -> None:
    known = arguments.HONOURED | arguments.REFUSED.keys() | arguments.WITHOUT_EFFECT.keys()
    assert {field.name for field in fields(config)} - known == trainer._fields | (REFUSED.keys() & vars(config).keys())
    assert not trainer._fields & (known | REFUSED.keys())


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        ({"activation_offloading": True}, {}, "cannot honour activation_offloading=True"),
        ({"label_smoothing_factor": 0.1}, {}, "cannot honour label_smoothing_factor=0.1"),
        ({}, {"compute_metrics": print}, "logits stay on the last stage"),
    ],
)
def test_refused_by_supervised_tuning(args: dict[str, Any], given: dict[str, Any], message: str) -> None:
    config = SFTConfig("out", use_cpu=True, **args)
    with pytest.raises(ValueError, match=message):
        PipelineSFTTrainer(llama(), config, train_dataset=texts(2), processing_class=tokenizer(), **given)


def test_refused_with_pairs() -> None:
    given = {"train_dataset": pairs(2), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="cannot honour sync_ref_model=True"):
        PipelineDPOTrainer(llama(), args=DPOConfig("out", use_cpu=True, sync_ref_model=True), **given)


def test_refused_after_the_constructor_of_trl() -> None:
    config = SFTConfig("out", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    given = {"args": config, "train_dataset": texts(8), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="num_microbatches splits batches, and the auxiliary loss"):
        PipelineSFTTrainer(mixtral(), num_microbatches=4, **given)
