"""The planner's accuracy on a tiny Llama: memory of measured ranks, and the figures of the tables."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, MixtralForCausalLM

import nxdpp
from benchmarks import planner_accuracy
from benchmarks.layouts.allocations import allocated
from benchmarks.layouts.job import Shape
from benchmarks.planner import published
from benchmarks.planner.layouts import describe
from benchmarks.planner.measure import live_bytes
from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.planning.layout import Layout
from nxdpp.planning.measured.kept_machine import KeptMachine
from tests.support.run_ranks import run_ranks

TINY = Shape(hidden=64, middle=128, layers=4, heads=4, vocabulary=256, batch=1, length=32, microbatches=4)
SPEED = KeptMachine(
    "cpu",
    {"cores": 2, "threads": 1, "ranks": 2},
    {"flops_2": 5e10, "flops_4": 5e10, "bandwidth": 1e10, "operation": 2e-6, "action": 1e-4, "latency": 1e-4}
    | dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "message_rate"), 1e9)
    | {"message_latency": 1e-4},
)


def test_the_memory_under_autocast_is_predicted() -> None:
    """Weights are converted once a step, activations in each microbatch."""
    layouts = (Layout(pipeline=2, checkpoint=True), Layout(tensor=2))

    rows = planner_accuracy.compare(layouts, TINY, SPEED, rounds=1, steps=1, autocast=torch.bfloat16)

    for row in rows:
        assert 0.9 < row.memory_ratio < 1.1, describe(row.prediction.layout)


def _published_rows() -> list[list[str]]:
    """Cells of the page's table of published runs."""
    page = (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "planner.md").read_text()
    block = page.partition("<!-- published -->")[2].partition("<!-- end of published -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")][2:]


def test_published_runs_of_our_recipe_are_predicted_within_15_percent() -> None:
    """The page has all runs. One of them is predicted again."""
    rows = _published_rows()

    expected = [(run.name, f"{name}, {chunks}") for run in published.RUNS for name, chunks in run.schedules]
    assert [(row[0], row[2]) for row in rows] == expected
    same = [float(row[5]) for row in rows if row[-1].startswith("same")]
    assert len(same) >= 16
    assert all(0.85 <= ratio <= 1.15 for ratio in same)
    run = next(run for run in published.RUNS if run.model == "6.2B")
    ((schedule, _),) = run.schedules
    ratio = published.predicted(run, replace(run.layout, schedule=schedule)).step_seconds / run.seconds
    (printed,) = (float(row[5]) for row in rows if (row[0], row[2]) == (run.name, f"{schedule}, 1"))
    assert ratio == pytest.approx(printed, abs=0.006)


def test_the_memory_of_the_published_405b_is_predicted() -> None:
    """The page has the bytes with the logits that another runtime keeps, and the ratio without them in its text."""
    schedule = "1f1b"
    runs = [run for run in published.RUNS if run.model == "405B" and run.memory]
    ((run, chunks),) = [(each, count) for each in runs for name, count in each.schedules if name == schedule]
    (row,) = [row for row in _published_rows() if (row[0], row[2]) == (run.name, f"{schedule}, {chunks}")]

    found = published.predicted(run, replace(run.layout, schedule=schedule, chunks=chunks))

    (gib,) = run.memory
    bytes_ = published.reserved(found, run.kept) / 2**30
    assert row[6:9] == [f"{gib:.1f}", f"{bytes_:.1f}", f"{bytes_ / gib:.2f}"]
    assert published.reserved(found) / 2**30 / gib == pytest.approx(0.83, abs=0.005)
    assert row[5] == f"{found.step_seconds / run.seconds:.2f}"


def _mixture() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_local_experts": 4}
    config: Any = AutoConfig.for_model("mixtral", vocab_size=512, num_attention_heads=4, num_key_value_heads=4, **sizes)
    model: nn.Module = MixtralForCausalLM(config)
    return model.to(torch.bfloat16)


def _peak(rank: int) -> tuple[int, float]:
    """Bytes at the peak of a step, and the tokens of this rank over the mean of the two that share experts."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(0)
    model = NxDPPModel(expert_parallelize(_mixture()), num_microbatches=4)
    optimizer = torch.optim.AdamW(model.local_parameters(), lr=1e-3)
    ids = torch.randint(0, 512, (4, 256), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()

    # The second step makes buckets of gradients.
    step()
    step()
    optimizer.zero_grad()
    gc.collect()
    kept = live_bytes()
    with allocated() as memory:
        step()
    return kept + memory.peak, 2 * model.last_expert_balance["routing"]["share"]


def test_the_peak_of_the_busiest_rank_that_shares_experts_is_planned() -> None:
    peaks = run_ranks(2, _peak)

    with torch.device("meta"):
        model = _mixture()
    ids = torch.empty(1, 256, dtype=torch.int64, device="meta")
    (planned,) = nxdpp.plan(
        model,
        devices=2,
        device_memory="1GB",
        device="cpu",
        global_batch=2 * 4,
        inputs={"input_ids": ids, "labels": ids},
        layouts=[Layout(data=2, experts=2)],
        expert_load=max(load for _, load in peaks),
    ).first.memory
    assert max(peak for peak, _ in peaks) == pytest.approx(planned.total, rel=0.05)
