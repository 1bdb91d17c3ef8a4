"""Losses, norms and metrics of the fine-tuning trainers are those of TRL in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.doors.transformers.test_trainer import Logs, assert_alike, without
from tests.doors.trl.tunings import REPLICATED, RESUMED, SHARDED, STAGES, Tuning, small_llama
from tests.support.run_ranks import run_ranks


def tune(rank: int, folder: Path) -> dict[str, Logs]:
    logs = {}
    for name, tuning in STAGES.items():
        trainer = tuning.trainer(folder / name, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        if name == RESUMED:
            trainer.save_model()
        logs[name] = trainer.state.log_history
    again = STAGES[RESUMED].trainer(folder / RESUMED, over_ranks=True)
    again.train(resume_from_checkpoint=str(folder / RESUMED / "checkpoint-2"))
    logs["resumed"] = again.state.log_history
    with pytest.raises(ValueError, match="logits stay on the last stage"):
        again.predict(again.eval_dataset)
    with pytest.raises(ValueError, match="cannot train PROMPT_TUNING"):
        Tuning(model=_prompted).trainer(folder / "prompted", over_ranks=True)
    unknown = STAGES["known references"].trainer(folder / "unknown", over_ranks=True)
    unknown.train_dataset = unknown.train_dataset.remove_columns("ref_chosen_logps")
    with pytest.raises(ValueError, match="a batch has no ref_chosen_logps"):
        unknown.train()
    return logs


def tune_replicas(rank: int, folder: Path) -> dict[str, Logs]:
    logs = {}
    for name, tuning in REPLICATED.items():
        trainer = tuning.trainer(folder / name, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        trainer.evaluate(trainer.eval_dataset.select(range(7)))
        logs[name] = trainer.state.log_history
    trainer.accelerator.even_batches = False
    with pytest.raises(ValueError, match="has 7 rows, no multiple of 4"):
        trainer._precompute_ref_logps(trainer.eval_dataset.select(range(7)), "eval", 2)
    shards = replace(SHARDED, args={**SHARDED.args, "fsdp": True})
    trainer = shards.trainer(folder / "shards", over_ranks=True, pipeline_parallel_size=2)
    for model in (trainer.pipelined, trainer._reference):
        assert all(isinstance(parameter, DTensor) for parameter in model.local_parameters())
    trainer.train()
    logs["shards"] = trainer.state.log_history
    return logs


def _prompted() -> Any:
    return get_peft_model(small_llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def two_stages(folder: Path) -> list[Any]:
    return run_ranks(2, tune, folder)


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(4, tune_replicas, tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("name", STAGES)
def test_two_stages_tune_as_one_process(name: str, two_stages: list[Any], folder: Path, tmp_path: Path) -> None:
    trainer = STAGES[name].trainer(tmp_path)
    trainer.train()
    for logs in two_stages:
        assert_alike(logs[name], trainer.state.log_history)
    if name == RESUMED:
        trainer.save_model()
        found, expected = (load_file(each / "adapter_model.safetensors") for each in (folder / name, tmp_path))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_tune_as_one_process(name: str, two_replicas: list[Any], tmp_path: Path) -> None:
    expected = _in_one_process(name, tmp_path, 2, 7)
    # The loss of an evaluation is the mean of the losses of batches, and these are the batches of each replica.
    for log, of_batches in zip(expected, _in_one_process(name, tmp_path), strict=False):
        log.update({key: value for key, value in of_batches.items() if key == "eval_loss"})
    for logs in two_replicas:
        assert_alike(*(without("total_flos", each[:-1]) for each in (logs[name], expected)))
        # The last batch has a row twice, which counts in the loss.
        assert_alike(*(without("eval_loss", each[-1:]) for each in (logs[name], expected)))


def test_shards_tune_as_one_process(two_replicas: list[Any], tmp_path: Path) -> None:
    trainer = SHARDED.trainer(tmp_path, 2)
    trainer.train()
    for logs in two_replicas:
        assert_alike(*(without("total_flos", each) for each in (logs["shards"], trainer.state.log_history)))


def test_a_resumed_tuning_has_the_same_logs(two_stages: list[Any]) -> None:
    for logs in two_stages:
        first, again = logs[RESUMED][:-1], logs["resumed"][:-1]
        # TRL counts the tokens of each call of train.
        assert_alike(*(without("num_tokens", each) for each in (again, first)))


def _in_one_process(name: str, folder: Path, evaluated_by: int = 1, rows: int = 0) -> Logs:
    trainer = REPLICATED[name].trainer(folder, 2, evaluated_by)
    trainer.train()
    if rows:
        trainer.evaluate(trainer.eval_dataset.select(range(rows)))
    logs: Logs = trainer.state.log_history
    return logs
