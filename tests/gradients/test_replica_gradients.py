"""Replicas whose parameters go apart, and replicas with the same batch."""

import io
import logging
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.ranks.faults import failure_watch
from tests.pipeline.after_wrapping.scripts import Layer, Plain, batch
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks


def step_in_a_hook(model: NxDPPModel, step: int) -> None:
    """Step by hand in the backward, before the average."""

    def descend(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)

    for parameter in model.local_parameters() if step == 1 else ():
        parameter.register_post_accumulate_grad_hook(descend)


def reset(model: NxDPPModel, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.local_parameters():
        nn.init.normal_(parameter)


def reset_by_replica(model: NxDPPModel, step: int) -> None:
    if step == 3:
        reset(model, dist.get_rank())


def reset_alike(model: NxDPPModel, step: int) -> None:
    if step == 3:
        reset(model, 0)


def train(change: Callable[[NxDPPModel, int], None]) -> tuple[int, str]:
    """Train 8 steps with ``change`` before each; return the number of steps, and the error."""
    torch.manual_seed(0)
    model = NxDPPModel(Plain(), transformer_layer_cls=Layer, num_microbatches=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = slice(2 * parallel_state.get_data_parallel_rank(), None)
    for step in range(1, 9):
        change(model, step)
        try:
            model.run_train(**{name: values[rows][:2] for name, values in batch().items()})
        except RuntimeError as error:
            return step, str(error)
        optimizer.step()
        optimizer.zero_grad()
    return 8, ""


def replicas_that_go_apart(rank: int) -> list[tuple[int, str]]:
    parallel_state.initialize_model_parallel()
    # All ranks raise the same error here: the process can train the next model.
    vars(failure_watch)["report"] = lambda error: None
    return [train(each) for each in (step_in_a_hook, reset_by_replica, reset_alike)]


def test_replicas_are_compared_in_steps_1_2_4_8() -> None:
    for found in run_ranks(2, replicas_that_go_apart):
        assert [step for step, _ in found] == [2, 4, 8]
        *messages, none = (message for _, message in found)
        assert none == "", "the remedy works"
        for message, ago in zip(messages, ("1 step ago", "2 steps ago"), strict=True):
            assert re.search(
                r"data-parallel rank 1 \(rank \d\) has other parameters than data-parallel rank 0", message
            )
            assert re.search(r"values of (embed|layers.2.linear).weight", message)
            assert f"had the same parameters {ago}." in message
            assert "Step the optimizer after run_train, and draw new values after the same torch.manual_seed" in message


def warnings_of(rank: int) -> list[str]:
    printed = io.StringIO()
    logging.getLogger("nxdpp").addHandler(logging.StreamHandler(printed))
    parallel_state.initialize_model_parallel()
    replica = parallel_state.get_data_parallel_rank()
    found = []
    # In the last but one, one replica has no hashes: the exchange is made all the same.
    for seed, hashes in ((replica, True), (0, True), (0, not replica), (0, False)):
        model = NxDPPModel(make("llama", layers=2), num_microbatches=2)
        model.move_model_to_device()
        replicas = model.steps.replicas
        verify = replicas.verify
        if not hashes:
            vars(replicas)["verify"] = lambda _, verify=verify: verify(())
        for _ in range(2):
            model.run_train(**padded_batch(4, seed=seed))
        found.append(printed.getvalue())
    return found


def without_labels(text: str) -> str:
    """``text`` without the warning that the batches have different numbers of labels."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("the microbatches have"))


def test_one_rank_tells_once_of_replicas_with_the_same_batch() -> None:
    own, *same = (without_labels("".join(texts)) for texts in zip(*run_ranks(2, warnings_of), strict=True))
    assert own == ""
    for each in same:
        assert each.count("all 2 data-parallel replicas have the same batch") == each.count("\n") == 1
