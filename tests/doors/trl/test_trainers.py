"""Losses, norms and metrics of the fine-tuning trainers are those of TRL in one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.doors.transformers.test_trainer import Logs, asked, assert_alike, marked, without
from tests.doors.trl.tunings import MORE, REPLICATED, RESUMED, TUNINGS, Tuning, pairs
from tests.support.models import llama
from tests.support.run_ranks import run_ranks

SHARDED = {"adapters": TUNINGS["recomputed adapters"], "pairs": Tuning(data=pairs, reference=llama)}
"""Fine-tunings that two replicas run with shards; the second has a reference model."""


def tune(rank: int, folder: Path, names: Sequence[str]) -> dict[str, Logs]:
    logs = {}
    for name in names:
        trainer = TUNINGS[name].trainer(folder / name, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        trainer.save_model()
        logs[name] = trainer.state.log_history
    return logs


def tune_one_pipeline(rank: int, folder: Path, names: Sequence[str]) -> dict[str, Logs]:
    logs = tune(rank, folder, names)
    for name in [name for name in RESUMED if name in names]:
        again = TUNINGS[name].trainer(folder / name, over_ranks=True)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
        logs[f"{name}, resumed"] = again.state.log_history
    with pytest.raises(ValueError, match="logits stay on the last stage"):
        again.predict(again.eval_dataset)
    prompted = replace(TUNINGS["texts"], model=_prompted)
    with pytest.raises(ValueError, match="cannot train PROMPT_TUNING"):
        prompted.trainer(folder / "prompted", over_ranks=True)
    unknown = TUNINGS["known references"].trainer(folder / "unknown", over_ranks=True)
    unknown.train_dataset = unknown.train_dataset.remove_columns("ref_chosen_logps")
    with pytest.raises(ValueError, match="a batch has no ref_chosen_logps"):
        unknown.train()
    return logs


def tune_replicas(rank: int, folder: Path, names: Sequence[str]) -> dict[str, Logs]:
    logs = {}
    for name in names:
        trainer = TUNINGS[name].trainer(folder / name, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        trainer.evaluate(trainer.eval_dataset.select(range(7)))
        logs[name] = trainer.state.log_history
    trainer.accelerator.even_batches = False
    with pytest.raises(ValueError, match="has 7 rows, no multiple of 4"):
        trainer._precompute_ref_logps(trainer.eval_dataset.select(range(7)), "eval", 2)
    for name, tuning in SHARDED.items():
        shards = replace(tuning, args={**tuning.args, "fsdp": True})
        trainer = shards.trainer(folder / "shards" / name, over_ranks=True, pipeline_parallel_size=2)
        models = [trainer.pipelined, *filter(None, [getattr(trainer, "_reference", None)])]
        assert all(isinstance(parameter, DTensor) for model in models for parameter in model.local_parameters())
        trainer.train()
        logs[f"{name}, sharded"] = trainer.state.log_history
    return logs


def _prompted() -> Any:
    return get_peft_model(TUNINGS["texts"].model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def one_pipeline(request: pytest.FixtureRequest, folder: Path) -> list[Any]:
    """The logs of the trainings that are compared in this run, and of the resumed ones."""
    names = list(dict.fromkeys([*asked(request, TUNINGS), RESUMED[-1]]))
    return run_ranks(2, tune_one_pipeline, folder, names)


@pytest.fixture(scope="module")
def two_replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    names = [*dict.fromkeys([*asked(request, REPLICATED), "pairs with adapters"])]
    return run_ranks(4, tune_replicas, tmp_path_factory.mktemp("replicas"), names)


@pytest.mark.parametrize("name", marked(TUNINGS, MORE))
def test_two_stages_tune_as_one_process(name: str, one_pipeline: list[Any], tmp_path: Path) -> None:
    expected = _in_one_process(name, tmp_path)
    for logs in one_pipeline:
        assert_alike(logs[name], expected)


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_tune_as_one_process(name: str, two_replicas: list[Any], tmp_path: Path) -> None:
    expected = _in_one_process(name, tmp_path, 2, 2, 7)
    # The loss of an evaluation is the mean of the losses of batches, and these are the batches of each replica.
    for log, of_batches in zip(expected, _in_one_process(name, tmp_path, 2), strict=False):
        log.update({key: value for key, value in of_batches.items() if key == "eval_loss"})
    for logs in two_replicas:
        assert_alike(*(without("total_flos", each[:-1]) for each in (logs[name], expected)))
        # The last batch has a row twice, which counts in the loss.
        assert_alike(*(without("eval_loss", each[-1:]) for each in (logs[name], expected)))


@pytest.mark.parametrize("shards", SHARDED)
def test_shards_tune_as_one_process(shards: str, two_replicas: list[Any], tmp_path: Path) -> None:
    trainer = SHARDED[shards].trainer(tmp_path, 2)
    trainer.train()
    for logs in two_replicas:
        found, expected = logs[f"{shards}, sharded"], trainer.state.log_history
        assert_alike(*(without("total_flos", each) for each in (found, expected)))


@pytest.mark.parametrize("name", marked(RESUMED, RESUMED[:1]))
def test_a_resumed_tuning_has_the_same_logs(name: str, one_pipeline: list[Any]) -> None:
    for logs in one_pipeline:
        first, again = logs[name][:-1], logs[f"{name}, resumed"][:-1]
        # TRL counts the tokens of each call of train.
        assert_alike(*(without("num_tokens", each) for each in (again, first)))


@pytest.mark.parametrize("name", marked(RESUMED, RESUMED[:1]))
def test_a_saved_model_is_that_of_one_process(name: str, one_pipeline: list[Any], folder: Path, tmp_path: Path) -> None:
    trainer = TUNINGS[name].trainer(tmp_path)
    trainer.train()
    trainer.save_model()
    found, expected = (_saved(each, TUNINGS[name].adapted) for each in (folder / name, tmp_path))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def _saved(folder: Path, adapted: str) -> dict[str, torch.Tensor]:
    if adapted:
        return load_file(folder / "adapter_model.safetensors")
    weights: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return weights


def _in_one_process(name: str, folder: Path, replicas: int = 1, evaluated_by: int = 1, rows: int = 0) -> Logs:
    trainer = TUNINGS[name].trainer(folder, replicas, evaluated_by)
    trainer.train()
    if rows:
        trainer.evaluate(trainer.eval_dataset.select(range(rows)))
    logs: Logs = trainer.state.log_history
    return logs
