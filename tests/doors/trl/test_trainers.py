"""Losses, norms and metrics of the fine-tuning trainers are those of TRL in one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.doors.transformers.test_trainer import Logs, assert_alike
from tests.doors.trl.tunings import REPLICATED, TUNINGS
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python


def tune(rank: int, folder: Path, names: Iterable[str], replicas: int) -> dict[str, Logs]:
    logs = {}
    for name in names:
        trainer = TUNINGS[name].trainer(folder / name, replicas, over_ranks=True, pipeline_parallel_size=2)
        trainer.train()
        logs[name] = trainer.state.log_history
    return logs


@pytest.fixture(scope="module")
def one_pipeline(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, tune, tmp_path_factory.mktemp("pipeline"), list(TUNINGS), 1, timeout=150.0)


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


def _in_one_process(name: str, folder: Path, replicas: int = 1) -> Logs:
    trainer = TUNINGS[name].trainer(folder, replicas)
    trainer.train()
    logs: Logs = trainer.state.log_history
    return logs
