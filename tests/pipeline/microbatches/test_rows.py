"""Splitting of inputs into microbatches and shared inputs."""

from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.rows import (
    check_batch,
    check_kinds,
    check_not_shared,
    split_inputs,
)
from tests.support.run_ranks import run_ranks

CPU = torch.device("cpu")


def _split(inputs: dict[str, Any], microbatches: int) -> list[dict[str, Any]]:
    check_kinds(inputs, CPU)
    check_batch(inputs, microbatches)
    return split_inputs(inputs, microbatches)


def test_tensors_are_split_in_order_and_shared_inputs_go_to_every_microbatch() -> None:
    ids = torch.arange(24).view(6, 4)
    positions = torch.arange(4).unsqueeze(0)
    shared = {"position_ids": positions, "mask": None, "scale": 0.5, "mode": "sum", "weight": torch.tensor(2.0)}

    parts = _split({"input_ids": ids, "labels": torch.arange(6), **shared}, 3)

    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), ids)
    assert [part["labels"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part[name] is value for name, value in shared.items() for part in parts)


def test_tensors_that_may_be_shared_are_a_question() -> None:
    ids = torch.zeros(4, 4).long()
    for inputs, names in (
        ({"ids": ids, "mask": torch.zeros(4, 4).bool(), "weight": torch.zeros(4)}, "mask, weight"),
        ({"hidden": torch.zeros(4, 4, 6), "weight": torch.zeros(4).half()}, "weight"),
        ({"ids": torch.zeros(4, 6).long(), "target": ids, "order": torch.arange(4)}, "order"),
    ):
        check_not_shared(inputs, 1, set())
        with pytest.raises(ValueError, match=f"batch has 4 rows of 4 tokens, so that {names} may") as caught:
            check_not_shared(inputs, 2, set())
        assert f"shared_inputs={names.split(', ')}" in str(caught.value)
    for usual in (
        # Tokens and labels of as many rows as tokens.
        {"ids": ids, "labels": ids},
        {"ids": torch.zeros(4, 6).long(), "mask": torch.zeros(4, 6), "weight": torch.zeros(4)},
        {"x": torch.zeros(4, 4), "target": torch.zeros(4)},
        {"latents": torch.zeros(4, 4, 8, 8), "sigma": torch.zeros(4), "positions": torch.zeros(1, 1).long()},
        {"hidden": torch.zeros(4, 6, 4), "weight": torch.zeros(4), "scale": torch.zeros(1), "none": None},
    ):
        check_not_shared(usual, 2, set())


class Layer(nn.Linear):
    """A layer."""


def with_a_hidden_state(rank: int, named: bool) -> float:
    """The loss of a step whose input is made on the device of the first parameter, or on the rank's own by name."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*[Layer(8, 8) for _ in range(4)])
    model = NxDPPModel(*(net, Layer, 2), loss_fn=nn.functional.mse_loss, broadcast_and_average_loss=True)
    first = model.original_module.get_submodule("0").weight
    assert isinstance(first, nn.Parameter)
    device = parallel_state.local_device() if named else first.device
    loss = model.run_train(input=torch.ones(4, 8, device=device), target=torch.zeros(4, 8))
    return float(loss)


def test_an_input_made_from_a_parameter_of_another_rank_is_refused_with_a_remedy() -> None:
    with pytest.raises(AssertionError, match=r"input input is on meta.*of another rank.*parallel_state.local_device"):
        run_ranks(2, with_a_hidden_state, False)
    assert len({*run_ranks(2, with_a_hidden_state, True)}) == 1
