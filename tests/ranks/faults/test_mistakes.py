"""Errors of torch and Python behind which there is a frequent mistake get a note that names it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.mistakes import add_note
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainModel

BATCH = {"x": torch.ones(4, 4)}


def notes(function: Callable[[], Any]) -> str:
    with pytest.raises((AttributeError, RuntimeError, TypeError)) as caught:
        function()
    add_note(caught.value)
    add_note(caught.value)
    return "\n".join(getattr(caught.value, "__notes__", ()))


def wrapped() -> Any:
    return NxDPPModel(PlainModel(), num_microbatches=2, output_loss_value_spec=True)


@pytest.mark.usefixtures("one_rank")
def test_a_second_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests before this one may have made steps in this process.
    monkeypatch.setattr(board, "_named", {})
    model = wrapped()
    lost: Any = None
    assert not notes(torch.zeros(()).backward)
    assert not notes(lambda: lost.backward())
    note = notes(model.run_train(**BATCH).backward)
    assert note == (
        "nxdpp: run_train has run the backward of all microbatches, and the loss that it returns is detached. Leave "
        "loss.backward() out: the gradients are in .grad."
    )
    assert all(parameter.grad is not None for parameter in model.local_parameters())
    assert notes(lambda: lost.backward()) == note
    assert not notes(lambda: lost.banana())
    # A pipeline of one rank returns every loss.
    assert not notes(lambda: lost.item())


def left_over(rank: int) -> dict[str, list[str]]:
    """Return the notes on a backward, and on ``item()`` of a loss that is elsewhere, after each kind of step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = NxDPPModel(layers, num_microbatches=2, transformer_layer_cls=nn.Linear, loss_fn=nn.MSELoss())
    inputs = {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}
    steps: dict[str, Callable[[], Any]] = {
        "run_train_microbatches": lambda: model.run_train_microbatches([inputs, inputs]),
        "run_eval": lambda: model.run_eval(**inputs),
        "run_train": lambda: model.run_train(**inputs),
    }
    told = {}
    for name, step in steps.items():
        model.zero_grad()
        loss = step()
        # No rank has a gradient after an evaluation, and all have one after a step without the line.
        assert all((each.grad is None) == (name == "run_eval") for each in model.parameters())
        told[name] = [notes(partial(_backward, loss)), "" if model.holds_last_stage else notes(partial(_item, loss))]
    return told


def _backward(loss: Any) -> Any:
    return loss.backward()


def _item(loss: Any) -> Any:
    return loss.item()


def test_the_note_names_the_call_that_came_last() -> None:
    for rank, told in enumerate(run_ranks(2, left_over)):
        for name, (backward, item) in told.items():
            if name == "run_eval":
                assert backward.startswith("nxdpp: run_eval computes no gradients"), backward
                assert backward.endswith("Train with run_train, which runs the backward too.")
            else:
                assert backward.startswith(f"nxdpp: {name} has run the backward of all microbatches"), backward
            assert ("broadcast_and_average_loss=True" in item) == (rank < 1)
