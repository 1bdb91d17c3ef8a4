"""The script that records the timeline of docs/schedules.md, with a smaller model."""

import os
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nxdpp.schedules.view.recorded import RecordedTimeline
from tests.support.run_ranks import run_ranks

SCRIPT = Path(__file__).with_name("record.py")


def _record(_rank: int, folder: Path) -> None:
    from transformers import LlamaConfig

    def smaller(**given: Any) -> LlamaConfig:
        return LlamaConfig(**given | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2})

    os.chdir(folder)
    with mock.patch("transformers.LlamaConfig", smaller):
        runpy.run_path(str(SCRIPT))


@pytest.mark.one_python
def test_the_script_records_five_steps(tmp_path: Path) -> None:
    run_ranks(2, _record, tmp_path)

    recorded = RecordedTimeline(tmp_path / "trace.json")
    assert recorded.complete == [0, 1, 2, 3, 4]
    assert recorded.step(3).name.startswith("step 3, train, 1f1b")
