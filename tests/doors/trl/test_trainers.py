"""Losses, norms and metrics of the fine-tuning trainers are those of TRL in one process."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.doors.transformers.test_trainer import Logs, assert_alike
from tests.doors.trl.tunings import REPLICATED, TUNINGS
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python


def tune(rank: int, folder: Path, names: Iterable[str], replicas: int) -> dict[str, Logs]:
    logs = {}
    for name in names:
        trainer = TUNINGS[name].trainer(folder / name, replicas, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        trainer.save_model(str(folder / name))
        logs[name] = trainer.state.log_history
    return logs


def tune_all(rank: int, folder: Path) -> dict[str, Logs]:
    logs = tune(rank, folder, TUNINGS, 1)
    saving = {"save_strategy": "steps", "save_steps": 2}
    for name in ("completions of a Qwen", "pairs with adapters"):
        tuning = replace(TUNINGS[name], args={**TUNINGS[name].args, **saving})
        tuning.trainer(folder / "saved" / name, over_ranks=True).train()
        again = tuning.trainer(folder / "saved" / name, over_ranks=True)
        again.train(resume_from_checkpoint=str(folder / "saved" / name / "checkpoint-2"))
        logs[f"{name}, resumed"] = again.state.log_history
    with pytest.raises(ValueError, match="logits stay on the last stage"):
        again.predict(again.eval_dataset)
    prompted = replace(TUNINGS["texts"], model=_prompted)
    with pytest.raises(ValueError, match="cannot train PROMPT_TUNING"):
        prompted.trainer(folder / "prompted", over_ranks=True)
    return logs


def _prompted() -> Any:
    return get_peft_model(TUNINGS["texts"].model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def one_pipeline(folder: Path) -> list[Any]:
    return run_ranks(2, tune_all, folder, timeout=150.0)


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(4, tune, tmp_path_factory.mktemp("replicas"), REPLICATED, 2, timeout=150.0)


@pytest.mark.parametrize("name", TUNINGS)
def test_two_stages_tune_as_one_process(name: str, one_pipeline: list[Any], tmp_path: Path) -> None:
    expected = _in_one_process(name, tmp_path)
    for logs in one_pipeline:
        assert_alike(logs[name], expected)


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_tune_as_one_process(name: str, two_replicas: list[Any], tmp_path: Path) -> None:
    expected = _in_one_process(name, tmp_path, 2)
    for logs in two_replicas:
        assert_alike(logs[name], expected)


@pytest.mark.parametrize("name", ["completions of a Qwen", "pairs with adapters"])
def test_a_resumed_tuning_has_the_same_logs(name: str, one_pipeline: list[Any]) -> None:
    for logs in one_pipeline:
        # TRL counts the tokens of each call of train.
        first, again = (_without_tokens(logs[each]) for each in (name, f"{name}, resumed"))
        assert_alike(again[:-1], first[:-1])


def _without_tokens(logs: Logs) -> Logs:
    return [{key: value for key, value in log.items() if "num_tokens" not in key} for log in logs]


@pytest.mark.parametrize("name", ["completions of a Qwen", "pairs with adapters"])
def test_a_saved_model_is_that_of_one_process(name: str, one_pipeline: list[Any], folder: Path, tmp_path: Path) -> None:
    trainer = TUNINGS[name].trainer(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path))
    file = "adapter_model.safetensors" if TUNINGS[name].adapted else "model.safetensors"
    expected, found = load_file(tmp_path / file), load_file(folder / name / file)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    if not TUNINGS[name].adapted:
        AutoModelForCausalLM.from_pretrained(folder / name)


def _in_one_process(name: str, folder: Path, replicas: int = 1) -> Logs:
    trainer = TUNINGS[name].trainer(folder, replicas)
    trainer.train()
    logs: Logs = trainer.state.log_history
    return logs
