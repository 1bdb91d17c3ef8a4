"""The table at the end of the main job: the ideal is that of the measured actions, and no digit is lost."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from figures import RankFigures, StepFigures, ideal, print_figures
from one_process import OneProcess, measure_one_process
from rich.console import Console
from settings import read_settings

from nxdpp import parallel_state
from nxdpp.schedules.families.registry import find_family

pytestmark = pytest.mark.one_python


def _settings(ranks: int, **others: Any) -> Any:
    values = {"schedule": None, "virtual_pipeline_size": 1, "num_microbatches": 4, "pipeline_parallel_size": ranks}
    return SimpleNamespace(**{**values, "tensor_parallel_size": 1, **others})


def _rank(actions: dict[str, float], stages: list[int] | None = None) -> RankFigures:
    return RankFigures("cpu", stages or [0], 239, 0.7341, 12_345_678_901, 987_654_321, 1234.5678, 18.0, actions)


def _seconds(ranks: int, schedule: str, chunks: int, times: dict[str, float]) -> list[RankFigures]:
    return [
        _rank({str(action): times[action.kind.value] for action in actions})
        for actions in find_family(schedule).build(ranks, 4, chunks)
    ]


def test_the_ideal_is_made_of_the_measured_actions() -> None:
    timeline = ideal(_settings(2), _seconds(2, "1f1b", 1, {"F": 1.0, "B": 2.0}))
    assert timeline is not None
    # A step of 4 microbatches and one more for the other stage.
    assert timeline.makespan == pytest.approx(5 * 3.0)
    assert timeline.mean_bubble == pytest.approx(0.2)
    settings = _settings(2, schedule="zb-v")
    timeline = ideal(settings, _seconds(2, "zb-v", 2, {"F": 1.0, "I": 1.0, "W": 1.0}))
    assert timeline is not None
    assert timeline.makespan < 26.0
    # XLA knows no seconds of actions.
    assert ideal(_settings(2), [_rank({}), _rank({})]) is None


def _printed(settings: Any, figures: list[RankFigures], one_process: OneProcess | None = None) -> list[str]:
    written = io.StringIO()
    print_figures(Console(file=written, width=80), settings, figures, one_process)
    return [line.rstrip() for line in written.getvalue().splitlines()]


def test_eight_ranks_at_80_columns() -> None:
    times = {"F": 1.0, "B": 2.0}
    figures = _seconds(8, "1f1b", 1, times)
    one = OneProcess(4567.8, "8 microbatches on 16 threads")
    lines = _printed(_settings(8), figures, one)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert sum("73.4%" in line and "12.3 GB" in line and "987.7 MB" in line for line in lines) == 8
    text = " ".join(" ".join(lines).split())
    assert "step 1,234,567.8 ms median, with clipping" in text
    # (4 + 7) * 3 s.
    assert "run_train 18,000.0 ms 0.55 times the ideal ideal 33,000.0 ms 1f1b, simulated" in text
    assert "bubble 26.6% mean of the ranks; 63.6% in the ideal, 63.6% if all stages were equal" in text
    assert "one process 4,567,800.0 ms 3.70 times the step of 8 processes; 8 microbatches on 16 threads" in text
    assert "busy: share of run_train in which a rank computes; the rest is the bubble" in text
    assert "peak memory: of the process" in text


def test_one_process_has_no_ideal_and_sends_nothing() -> None:
    text = " ".join(_printed(_settings(1), [_rank({"0F0": 1.0})], OneProcess(617.28, "4 microbatches")))
    assert "0.50 times the step with nxdpp; 4 microbatches" in " ".join(text.split())
    text = " ".join(_printed(_settings(1), [_rank({"0F0": 1.0})], OneProcess(None, "it does not fit")))
    assert "sent" not in text
    assert "ideal" not in text
    assert "bubble" not in text
    assert "it does not fit" in text
    assert "tensor" not in text
    text = " ".join(_printed(_settings(1, tensor_parallel_size=2), [_rank({"0F0": 1.0})]))
    assert "the messages between tensor-parallel ranks count as busy" in text
    assert "busy: share of run_train in which the process computes" in text


def test_the_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("figures.from_all_ranks", lambda own: [own])
    monkeypatch.setattr(parallel_state, "local_device", lambda: torch.device("cpu"))
    model: Any = SimpleNamespace(local_stages=[0], last_busy_share=0.1, last_step_seconds=9.0, last_sent_bytes=99)
    model.last_action_seconds = {"0F0": 5.0}
    steps = StepFigures(model)
    steps.step_done()
    assert steps.of_all_ranks() == []
    for busy, seconds in ((0.5, 2.0), (0.7, 4.0), (0.6, 3.0)):
        model.last_busy_share, model.last_step_seconds, model.last_sent_bytes = busy, seconds, 64
        model.last_action_seconds = {"0F0": seconds}
        steps.step_done()
    (own,) = steps.of_all_ranks()
    assert own.busy == pytest.approx(0.6)
    assert (own.steps, own.run_train, own.sent_bytes) == (3, 3.0, 64)
    assert own.actions == {"0F0": 3.0}
    assert own.peak_bytes > 10_000_000


def test_a_save_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("figures.from_all_ranks", lambda own: [own])
    monkeypatch.setattr(parallel_state, "local_device", lambda: torch.device("cpu"))
    now = [0.0]
    monkeypatch.setattr("figures.time.perf_counter", lambda: now[0])
    model: Any = SimpleNamespace(local_stages=[0], last_busy_share=0.5, last_step_seconds=1.0, last_sent_bytes=0)
    model.last_action_seconds = {}
    steps = StepFigures(model)
    for _ in range(3):
        now[0] += 2.0
        steps.step_done()
        now[0] += 30.0
        steps.saved()
    assert steps.of_all_ranks()[0].step == 2.0


def test_one_process_takes_the_whole_batch(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("one_process._cores", lambda: 2)
    own = torch.get_num_threads()
    batches: list[torch.Size] = []
    monkeypatch.setattr("one_process.STEPS", 2)
    settings = read_settings(["--batch-size", "8", "--seq-length", "4", "--num-microbatches", "2"])
    forward = type_of_model().forward
    monkeypatch.setattr(type_of_model(), "forward", lambda *own, **ids: _noted(batches, forward, own, ids))
    measured = measure_one_process(settings, torch.device("cpu"), 4)
    assert measured.step is not None
    assert measured.step > 0.0
    tried = {own, min(2 * own, 2)}
    assert measured.said in [f"4 microbatches on {threads} thread(s)" for threads in tried]
    assert torch.get_num_threads() == own
    assert batches == [torch.Size([2, 4])] * (8 * len(tried))


def type_of_model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def _noted(batches: list[torch.Size], forward: Any, own: Any, ids: Any) -> Any:
    # A cache would be work that the pipeline does not do.
    assert ids.pop("use_cache") is False
    batches.append(ids["input_ids"].shape)
    return forward(*own, **ids)
