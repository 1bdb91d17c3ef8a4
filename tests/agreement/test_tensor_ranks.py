"""Ranks of a tensor group that are about to run different steps raise an error; the remedy works."""

import re
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement.input_hash import InputHashes
from nxdpp.agreement.step_signature import StepSignature
from nxdpp.agreement.tensor_ranks import verify_tensor_ranks
from tests.support.run_ranks import run_ranks
from tests.support.tensor_parallel_models import ParallelLayer, ParallelModel

A = StepSignature((("a", (2, 3), torch.int64),), (False, torch.bfloat16), True)
B = StepSignature((("b", (2, 3), torch.int64),), (False, torch.bfloat16), False)
LEAST = -(2**63)
EQUAL = (A, InputHashes(("a",), (LEAST,)), 1, False, False)
# The arguments of the second tensor rank, and the words of the message on both.
DIFFERENT: list[tuple[tuple[Any, ...], str]] = [
    (
        (A, InputHashes(("a",), (LEAST + 1,)), 1, False, False),
        r"tensor-parallel rank 1 \(rank 1\) was given other values",
    ),
    ((A, InputHashes(("a",), (LEAST,), ("a",), (1,)), 1, False, False), r"other values of a in the step before than"),
    (
        (B, InputHashes(("a",), (LEAST,)), 1, False, False),
        r"rank 0 \(rank 0\): run_train\n.*rank 1 \(rank 1\): run_eval\n",
    ),
    ((A, InputHashes(("a",), (LEAST,)), 2, False, False), r"rank 1 \(rank 1\) begins its step 2, and .* its step 1\."),
    ((A, InputHashes(("a",), (LEAST,)), 1, True, False), r"rank 1 \(rank 1\) has been refreshed, moved or loaded"),
    ((A, InputHashes(("a",), (LEAST,)), 1, False, True), r"rank 1 \(rank 1\) runs a step in no_sync\(\)"),
]


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(12, (4, 4), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def wrap() -> NxDPPModel:
    torch.manual_seed(1)
    return NxDPPModel(ParallelModel(2, 12, False), transformer_layer_cls=ParallelLayer, num_microbatches=2)


def compare(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_control_group()
    for other, words in DIFFERENT:
        verify_tensor_ranks(group, *EQUAL)
        with pytest.raises(RuntimeError) as raised:
            verify_tensor_ranks(group, *(other if rank else EQUAL))
        assert re.search(words, str(raised.value), re.DOTALL), str(raised.value)
    # The remedy of the message.
    model = wrap()
    for step in range(2):
        model.run_train(**batch(10 * step + parallel_state.get_data_parallel_rank()))
    model.run_eval(**batch(3))


def test_both_ranks_show_the_difference() -> None:
    run_ranks(2, compare)


def other_rows_in_the_second_evaluation(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = wrap()
    model.run_eval(**batch(0))
    # Values on a device are compared in the next step.
    for _ in range(2):
        model.run_eval(**batch(rank))


def test_a_mistake_ends_all_ranks() -> None:
    words = "other values of input_ids, labels (in the step before )?than tensor-parallel rank 0 "
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, other_rows_in_the_second_evaluation)
