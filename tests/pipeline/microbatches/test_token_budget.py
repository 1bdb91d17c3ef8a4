"""Rows packed to a budget of tokens, and steps of as many microbatches as they need."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nxdpp import NxDPPModel, batches_of_tokens, parallel_state
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks

MOST = 24


def rows_of(step: int, replica: int = 0) -> list[dict[str, Tensor]]:
    """Six to nine rows of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    lengths = torch.randint(3, 13, (6 + (step + replica) % 4,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for length in lengths]


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": padded, "attention_mask": (labels != -100).long(), "labels": labels}


def test_groups_are_within_the_budget_and_have_each_row_once() -> None:
    for step in range(20):
        rows = rows_of(step)
        groups = batches_of_tokens(rows, MOST)
        assert all(len(group) * max(len(row["input_ids"]) for row in group) <= MOST for group in groups)
        assert sorted(id(row) for group in groups for row in group) == sorted(map(id, rows))
        # A group has no room for the first row of the next one.
        for group, after in pairwise(groups):
            assert (len(group) + 1) * max(len(row["input_ids"]) for row in [*group, after[0]]) > MOST
    assert batches_of_tokens([[1] * 7, [1] * 3, [1] * 5, [1] * 2, [1] * 2], 10) == [
        [[1] * 7],
        [[1] * 5, [1] * 3],
        [[1] * 2, [1] * 2],
    ]
    assert batches_of_tokens(["abc", "d"], 3, length=len) == [["abc"], ["d"]]


@pytest.mark.parametrize(
    ("rows", "most", "message"),
    [
        ([[1] * 7], 6, r"a row has 7 tokens, and a microbatch at most most_tokens=6\. Raise most_tokens to 7"),
        ([[1]], 0, r"most_tokens=0 must be a whole number"),
        ([], 6, r"was given no rows"),
        ([3], 6, r"a row is a int, whose tokens are not known: give length="),
    ],
)
def test_what_cannot_be_packed_is_refused(rows: list[Any], most: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches_of_tokens(rows, most)


def seeded(layers: int) -> Any:
    torch.manual_seed(0)
    return llama(layers)


def by_need(stages: int, schedule: str, chunks: int) -> tuple[int, list[list[list[int]]]]:
    """Train with other numbers of microbatches in each step and on each replica, and compare with one process.

    Returns the number of the replica, and the lengths of the rows of each group of each step.
    """
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    layers = stages * chunks
    model = NxDPPModel(
        seeded(layers),
        num_microbatches=stages,
        schedule=schedule,
        virtual_pipeline_size=chunks,
        loss_normalization="tokens",
        broadcast_and_average_loss=True,
    )
    whole = seeded(layers)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, whole))
    packed = []
    for step in (0, 1, 3):
        # First all rows in one microbatch, fewer than stages; then a few; and last each row in one, more than stages.
        groups = batches_of_tokens(rows_of(step, replica), (200, MOST, MOST, 12)[step])
        microbatches = [collated(group) for group in groups]
        packed.append([[len(row["input_ids"]) for row in group] for group in groups])
        ours.zero_grad()
        loss = model.run_train_microbatches(microbatches)
        model.clip_grad_norm_(1.0)
        ours.step()
        theirs.zero_grad()
        expected = whole(**collated([row for each in range(replicas) for row in rows_of(step, each)])).loss
        expected.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=1e-3, atol=1e-5)
    with pytest.raises(
        AttributeError, match=rf"num_microbatches=6 comes after.*wrapped with {stages}.*run_train_microb"
    ):
        model.num_microbatches = 6
    assert model.num_microbatches == stages
    # The remedy: six of them.
    batches = [rows_of(0, each)[:6] for each in range(replicas)]
    loss = model.run_train_microbatches([collated([row]) for row in batches[replica]])
    expected = whole(**collated([row for rows in batches for row in rows])).loss
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=1e-4)
    assert model.run_train(**collated(batches[replica][:4])) is not None
    return replica, packed


SCHEDULES = {2: (("zb-h1", 1), ("interleaved", 2)), 4: (("1f1b", 1),)}
"""By the number of ranks, which have two stages each: schedules, and stages on a rank."""


def by_need_with_each_schedule(rank: int, ranks: int) -> list[tuple[int, list[list[list[int]]]]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return [by_need(2, *schedule) for schedule in SCHEDULES[ranks]]


@pytest.mark.parametrize("ranks", SCHEDULES)
def test_steps_of_any_number_of_microbatches_are_those_of_one_process(ranks: int) -> None:
    for of_ranks in zip(*run_ranks(ranks, by_need_with_each_schedule, ranks), strict=True):
        # All ranks of a pipeline have packed the same groups.
        of_replicas = dict(of_ranks)
        assert all(packed == of_replicas[replica] for replica, packed in of_ranks)
        assert len(of_replicas) == ranks // 2
        numbers = {len(groups) for groups in of_replicas[0]}
        assert min(numbers) < 2 < max(numbers)
