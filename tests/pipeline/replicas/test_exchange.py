"""Replicas that are about to exchange different values raise, each with both names, before a value is sent."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
from torch import nn

from nxdpp import parallel_state
from nxdpp.pipeline.local.part import LocalPart
from nxdpp.pipeline.loss.item_counts import of_all_replicas
from nxdpp.pipeline.replicas import exchange as replica_exchange
from nxdpp.pipeline.replicas import gradients as replica_gradients
from nxdpp.pipeline.replicas.exchange import ReplicaExchanges
from nxdpp.pipeline.replicas.gradients import ReplicaGradients
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python


def message(exchanges: ReplicaExchanges, name: str, details: list[str] | None = None) -> str:
    with pytest.raises(RuntimeError) as raised:
        exchanges.begin(name, details or [])
    return str(raised.value)


def exchange(rank: int) -> dict[str, str]:
    parallel_state.initialize_model_parallel()
    # A reported failure would end the ranks.
    for module in (replica_exchange, replica_gradients):
        vars(module)["failure_watch"] = SimpleNamespace(reported=nullcontext)
    same = ReplicaExchanges({"number": 1})
    same.begin("average", ["a"])
    assert of_all_replicas([2.0 + rank], same, "items") == [[2.0], [3.0]]
    # Equal notes take one message, others a second exchange. The exchange goes on while the rank does other things.
    equal, different = same.start("average", ["a"], [3, -3]), same.start("average", ["a"], [rank, -rank, 7])
    assert (equal(), different()) == ([3, -3], [1, 0, 7])
    wrong = same.start("average", [f"detail {rank}"], [rank])
    with pytest.raises(RuntimeError, match="has other settings than"):
        wrong()
    found = {
        "name": message(same, f"average {rank}", [f"detail {rank}"]),
        "details": message(same, "average", ["a", f"detail {rank}"]),
        "settings": message(ReplicaExchanges({"rule": "tokens" if rank else "microbatch"}), f"average {rank}"),
    }
    # As many trained parameters of the same shape on each replica: the average would mix them.
    pair = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    pair[rank].requires_grad_(False)
    with pytest.raises(RuntimeError) as raised:
        ReplicaGradients(cast(LocalPart, SimpleNamespace(module=pair)), same).average()
    same.begin("average", ["a"])
    return {**found, "frozen": str(raised.value)}


def test_replicas_in_different_exchanges_are_refused() -> None:
    first, second = "data-parallel rank 0 (rank 0)", "data-parallel rank 1 (rank 1)"
    for found in run_ranks(2, exchange):
        assert f"{first} is in  (average 0), and {second} in  (average 1). Make the same calls" in found["name"]
        assert f"{first}: detail 0\n  {second}: detail 1\n" in found["details"]
        assert f"{first}: rule='microbatch'\n  {second}: rule='tokens'\n" in found["settings"]
        assert f"{first}: trained 1.weight\n  {second}: trained 0.weight\n" in found["frozen"]
