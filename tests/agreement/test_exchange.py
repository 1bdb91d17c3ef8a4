"""Replicas that are about to exchange different values raise, each with both names, before a value is sent."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement import exchange as replica_exchange
from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.gradients import replica_gradients as replica_gradients
from nxdpp.gradients.replica_gradients import RankParameters, ReplicaGradients
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainLayer


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
    assert same.gathered("items", [2.0 + rank]) == [[2.0], [3.0]]
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
        ReplicaGradients(cast(RankParameters, SimpleNamespace(module=pair)), same).average()
    same.begin("average", ["a"])
    return {**found, "frozen": str(raised.value)}


def test_replicas_in_different_exchanges_are_refused() -> None:
    first, second = "data-parallel rank 0 (rank 0)", "data-parallel rank 1 (rank 1)"
    for found in run_ranks(2, exchange):
        assert f"{first} is in  (average 0), and {second} in  (average 1). Make the same calls" in found["name"]
        assert f"{first}: detail 0\n  {second}: detail 1\n" in found["details"]
        assert f"{first}: rule='microbatch'\n  {second}: rule='tokens'\n" in found["settings"]
        assert f"{first}: trained 1.weight\n  {second}: trained 0.weight\n" in found["frozen"]


def train(rank: int, differs: str) -> None:
    parallel_state.initialize_model_parallel()
    losses = (nn.functional.mse_loss, nn.functional.l1_loss)
    options: dict[str, Any] = {"num_microbatches": 2, "loss_fn": losses[0]}
    if differs == "loss_fn":
        options[differs] = losses[rank]
    torch.manual_seed(0)
    model = NxDPPModel(nn.Sequential(*(PlainLayer() for _ in range(2))), **options)
    batch = {"input": torch.ones(4, 4), "target": torch.ones(4, 4)}
    # The replicas compare their parameters in the first step, and their modes in each.
    for differing in (False, bool(rank)):
        with torch.autocast(batch["input"].device.type, torch.bfloat16, enabled=differing and differs == "autocast"):
            model.run_train(**batch)


@pytest.mark.parametrize("differs", ["loss_fn", "autocast"])
def test_replicas_with_other_settings_are_refused(differs: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, train, differs)
    first, second = {
        "loss_fn": ("loss_fn=torch.nn.functional.mse_loss<>", "loss_fn=torch.nn.functional.l1_loss<>"),
        "autocast": ("autocast: none", "autocast: torch.bfloat16"),
    }[differs]
    lines = f"data-parallel rank 0 (rank 0): {first}\n  data-parallel rank 1 (rank 1): {second}\n"
    assert lines in str(caught.value)
    assert "Wrap the same model with the same arguments, and set the same modes, in every" in str(caught.value)
