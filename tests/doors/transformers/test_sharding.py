"""FSDP's words of ``TrainingArguments``: honoured as ``fully_shard`` does, or refused by key."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from nxdpp.doors.transformers import arguments, checks, sharding
from tests.support.models import llama


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return partial(TrainingArguments, output_dir=str(tmp_path), use_cpu=True, report_to="none")


@pytest.mark.parametrize(
    ("fsdp", "config"),
    [
        (True, None),
        ("shard_grad_op offload", {"fsdp_version": 2}),
        (
            True,
            {"reshard_after_forward": "false", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        ),
    ],
)
def test_words_that_fully_shard_has_are_taken(fsdp: Any, config: Any, make: Any) -> None:
    args = make(fsdp=fsdp, fsdp_config=config)
    arguments.check_arguments(args)
    sharding.check_layers(args, llama(2), None)


@pytest.mark.parametrize(
    ("fsdp", "config", "message"),
    [
        (True, {"version": 1}, r"version=1 of fsdp_config: FSDP1 .* Set 2; data_parallel_shard_size"),
        (True, {"reshard": True}, "reshard=True of fsdp_config: it is unknown. It takes activation_checkpointing, "),
        (None, {"version": 2}, r"fsdp_config={'version': 2}: it is read with fsdp=True"),
    ],
)
def test_other_words_are_refused_by_key(fsdp: Any, config: Any, message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=f"PipelineTrainer cannot honour {message}"):
        arguments.check_arguments(make(fsdp=fsdp, fsdp_config=config))


def test_what_does_not_go_with_shards_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = make(fsdp=True)
    optimizer = torch.optim.SGD(llama(2).parameters())
    with pytest.raises(ValueError, match=r"cannot honour optimizers with fsdp: .* Give optimizer_cls_and_kwargs"):
        checks.check_optimizer(None, optimizer, sharded)
    checks.check_optimizer(None, optimizer, make())
    with pytest.raises(ValueError, match=r"optim='adafactor' with fsdp: .* Take adamw_torch"):
        arguments.check_arguments(make(fsdp=True, optim="adafactor"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"use_fsdp of accelerate's configuration.* fsdp=True, and start without it"):
        arguments.check_arguments(make())
