"""Metrics that ranks write: lines of steps, starts after one another, and faults."""

import json
import logging
import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxdpp import MetricsFile, NxDPPModel, parallel_state
from nxdpp.ranks.faults.ending_process import fault_listeners
from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks


def _records(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"metrics/rank{rank:04}.jsonl").read_text().splitlines()]


def _model() -> NxDPPModel:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    return NxDPPModel(llama(2), num_microbatches=2)


def train(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Train four steps, then two that resume after the third."""
    model = _model()
    ids = torch.arange(16).view(2, 8) % VOCABULARY
    spans = []
    for done, last in ((0, 4), (3, 5)):
        with MetricsFile(folder, model, done=done, steps=5, actions_every=2) as metrics:
            for step in range(done, last):
                loss = model.run_train(input_ids=ids, labels=ids)
                metrics.write(loss, 16, norm=torch.tensor(float(step)), experts=torch.tensor([rank, 2]))
                spans.append({"busy": model.last_busy_share, "seconds": model.last_action_seconds})
            metrics.add(eval_loss=float("nan"))
    assert not fault_listeners
    return spans


@pytest.mark.cpu_only("it reads the memory of the process, where the CPU has its tensors")
def test_each_rank_writes_its_steps(tmp_path: Path) -> None:
    spans = run_ranks(2, train, tmp_path)
    run = RunMetrics(tmp_path)
    curves = run.curves()
    # Rank 0 has no loss: it is of the last stage.
    assert [step for step, _ in curves["loss"]] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(value) for _, value in curves["loss"])
    assert curves["norm"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)]
    assert str(curves["eval_loss"]) == "[(5, nan)]"
    for rank, metrics in run.ranks.items():
        assert metrics.ends
        assert metrics.about["stages"] == [rank]
        assert metrics.about["schedule"] == "1f1b"
        assert metrics.last["experts"] == [rank, 2]
        assert metrics.last["bytes"] > 1 << 26
        assert metrics.last["busy"] == pytest.approx(spans[rank][-1]["busy"], abs=1e-4)
        told = {str(span.action): span.end - span.start for span in metrics.actions[4]}
        assert told == pytest.approx(spans[rank][-2]["seconds"], abs=2e-6)
        assert metrics.about["versions"]["torch"] == torch.__version__
        assert metrics.about["versions"].keys() == {"nxdpp", "torch", "transformers", "python"}
        assert "python" in metrics.about["command"]
        began = [line["time"] for line in _records(tmp_path, rank) if "begins" in line]
        assert all(began[0] - 1 < span.start < metrics.seen_at for span in metrics.actions[4])
    # The backward of the last stage comes after the forward of the first, on one clock.
    first, last = ({str(span.action): span for span in run.ranks[rank].actions[4]} for rank in (0, 1))
    for number in (0, 1):
        assert first[f"0F{number}"].end <= last[f"1F{number}"].start + 1e-3
        assert last[f"1B{number}"].end <= first[f"0B{number}"].start + 1e-3
    summary = summary_of(run, 0.0)
    assert (summary["state"], summary["step"], summary["experts"]) == ("done", 5, [1, 4])


def fall(rank: int, folder: Path) -> None:
    model = _model()
    ids = torch.arange(16).view(2, 8) % VOCABULARY
    metrics = MetricsFile(folder, model)
    for step in range(3):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        metrics.write(model.run_train(input_ids=ids, labels=ids))


def test_a_run_that_died_has_its_last_steps_and_the_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, fall, tmp_path)
    summary = summary_of(RunMetrics(tmp_path), 0.0)
    assert summary["state"] == "fault"
    assert summary["faults"][0]["text"].startswith("rank 1 died without an error")
    assert [(row["step"], row["state"]) for row in summary["ranks"]] == [(2, "fault"), (2, "died")]


def leave(rank: int, folder: Path) -> None:
    """Leave four blocks in turn: by an error that is caught, by an end without an error, whole, and by the last one."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    model = NxDPPModel(llama(2), num_microbatches=1)
    for error in (ValueError("caught"), SystemExit(0)):
        with suppress(ValueError, SystemExit), MetricsFile(folder, model):
            raise error
        assert summary_of(RunMetrics(folder), 0.0)["left"] == f"{type(error).__name__}: {error}"
    with MetricsFile(folder / "other", model):
        assert summary_of(RunMetrics(folder / "other"), 0.0)["state"] == "running"
    with MetricsFile(folder, model):
        raise ValueError("no more")


def test_the_last_line_says_how_the_block_was_left(tmp_path: Path) -> None:
    """In a world of one process too, where no failure watch adds a fault."""
    with pytest.raises(AssertionError, match="no more"):
        run_ranks(1, leave, tmp_path)
    summary = summary_of(RunMetrics(tmp_path), 0.0)
    assert (summary["state"], summary["left"], summary["ranks"][0]["state"]) == ("left", "ValueError: no more", "left")
    assert [line["ends"] for line in _records(tmp_path, 0) if "ends" in line] == [
        "ValueError: caught",
        "SystemExit: 0",
        "ValueError: no more",
    ]
    assert _records(tmp_path / "other", 0)[-1]["ends"] is True


@pytest.fixture
def model(one_rank: None) -> NxDPPModel:
    return NxDPPModel(llama(2), num_microbatches=1)


def test_a_closed_file_takes_a_late_evaluation(tmp_path: Path, model: NxDPPModel) -> None:
    with MetricsFile(tmp_path, model) as metrics:
        metrics.write(1.0)
    metrics.add(held_out_loss=0.5)
    metrics.add(accuracy=0.75)
    run = RunMetrics(tmp_path)
    assert (run.curves()["held_out_loss"], run.curves()["accuracy"]) == ([(1, 0.5)], [(1, 0.75)])
    assert run.ranks[0].ends
    assert not fault_listeners
    with MetricsFile(tmp_path, model):
        pass
    with pytest.raises(ValueError, match="closed"):
        metrics.add(held_out_loss=0.25)


def test_wrong_values_and_names_are_refused(tmp_path: Path, model: NxDPPModel) -> None:
    with MetricsFile(tmp_path, model) as metrics:
        with pytest.raises(TypeError, match="norm='much' must be a number, a list of numbers or a tensor"):
            metrics.write(norm="much")
        with pytest.raises(ValueError, match=r"seconds=: a line has seconds of its own. Choose another name"):
            metrics.add(seconds=1)
        # None of them is a step.
        metrics.write(np.float32(1.5), norm=None, counts=np.arange(2).tolist())
        assert _records(tmp_path, 0)[-1].items() >= {"step": 1, "loss": 1.5}.items()
        with pytest.raises(ValueError, match=r"loss= has 2 numbers, as with return_mb_loss=True: give their mean"):
            metrics.write([torch.tensor(1.0), torch.tensor(2.0)])
    with pytest.raises(TypeError, match="must be an NxDPPModel, not Linear: wrap it first"):
        MetricsFile(tmp_path, torch.nn.Linear(1, 1))  # type: ignore[arg-type]  # refused


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, model: NxDPPModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with MetricsFile(tmp_path, model) as metrics, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            metrics.write(1)
            metrics.write(1)
        metrics.write(1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{metrics.path} lacks lines: No space left on device. The training continues."
    ]
    assert [line["step"] for line in _records(tmp_path, 0) if "step" in line] == [3]
