"""Data parallelism on XLA devices: numbers of the CPU and of one process, and no graph after the second step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxdpp import parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks
from tests.xla.data_parallel_cases import Case, Outcome, in_one_process, run

CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "interleaved": Case(tied=True, options={"virtual_pipeline_size": 2}),
    "bfloat16": Case(dtype=torch.bfloat16),
}


def _refusal() -> str:
    """Return the refusal of a device tensor that reaches gloo, on the CPU an empty text."""
    try:
        dist.all_reduce(torch.ones(2, device=parallel_state.local_device()))
    except RuntimeError as error:
        return str(error)
    return ""


def _all(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    found: dict[str, Any] = {name: run(case) for name, case in CASES.items()}
    found["guard"] = _refusal()
    found["one process"] = in_one_process(tied=True)
    return found


@pytest.fixture(scope="module")
def on_cpu() -> list[dict[str, Any]]:
    return run_ranks(4, _all, None)


@pytest.fixture(scope="module")
def on_xla() -> list[dict[str, Any]]:
    return run_xla_ranks(4, _all, "xla")


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_cpu(name: str, on_cpu: list[dict[str, Any]], on_xla: list[dict[str, Any]]) -> None:
    bits = 2e-2 if CASES[name].dtype == torch.bfloat16 else 1e-5
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        expected, found = cpu[name], xla[name]
        torch.testing.assert_close(found.results, expected.results, rtol=0, atol=bits)
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=bits)
        torch.testing.assert_close(found.parameters, expected.parameters, rtol=0, atol=bits)


@pytest.mark.parametrize("name", CASES)
def test_no_graph_after_the_second_optimizer_step(name: str, on_xla: list[dict[str, Any]]) -> None:
    for rank in on_xla:
        outcome: Outcome = rank[name]
        assert outcome.graphs[2:] == [0, 0, 0]


def test_one_process_with_the_same_microbatches(on_xla: list[dict[str, Any]]) -> None:
    for rank in on_xla:
        loss, gradients = rank["one process"]
        torch.testing.assert_close(rank["tied"].first_loss, loss, rtol=0, atol=1e-6)
        for name, found in rank["tied"].gradients.items():
            torch.testing.assert_close(found, gradients[name], rtol=0, atol=1e-6)


def test_a_device_tensor_at_gloo_is_refused(on_cpu: list[dict[str, Any]], on_xla: list[dict[str, Any]]) -> None:
    assert {rank["guard"] for rank in on_cpu} == {""}
    assert all("of a tensor on an XLA device" in rank["guard"] for rank in on_xla)
