"""Steps of given microbatches: of any number and sizes, with the losses and gradients of one process."""

import copy
from typing import Any

import pytest
import torch

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks

# Lengths of the rows of each microbatch, step by step.
STEPS = [[5, 7, 5], [6], [4, 4, 8, 4]]


def microbatches(lengths: list[int], items: float | None = None) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    given: list[dict[str, Any]] = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        number = {} if items is None else {"num_items_in_batch": items}
        given.append({"input_ids": ids, "labels": ids, **number})
    return given


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    model = llama(2)
    whole = copy.deepcopy(model)
    pipeline = NxDPPModel(model, num_microbatches=3, schedule="zb-h1")
    for items in (None, 40.0):
        for given in (microbatches(lengths, items) for lengths in STEPS):
            model.zero_grad()
            whole.zero_grad()
            losses = pipeline.steps.train_microbatches(given)
            expected = [whole(**each, use_cache=False).loss for each in given]
            for loss in expected:
                (loss / len(expected) if items is None else loss).backward()
            _assert_equal(losses, expected, 1 if items is None else len(given))
            _assert_gradients(pipeline, whole)
            for loss in expected:
                loss.detach_()
            _assert_equal(pipeline.steps.eval_microbatches(given), expected)
            outputs = pipeline.steps.eval_microbatches(given, outputs=True)
            for output, each in zip(outputs, given, strict=True):
                assert torch.equal(output.logits, whole(**each, use_cache=False).logits)


def _assert_equal(losses: list[torch.Tensor], expected: list[torch.Tensor], factor: int = 1) -> None:
    assert [float(loss) for loss in losses] == [float(loss.detach() * factor) for loss in expected]


def _assert_gradients(pipeline: NxDPPModel, whole: torch.nn.Module) -> None:
    expected = dict(whole.named_parameters())
    for name, parameter in pipeline.local_module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-7, rtol=0)


def with_a_written_schedule(rank: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    pipeline = NxDPPModel(llama(2), schedule=[["0F0", "0B0"], ["1F0", "1B0"]])
    pipeline.steps.train_microbatches(microbatches([5]))
    assert len(pipeline.steps.eval_microbatches(microbatches([5, 6]))) == 2
    with pytest.raises(ValueError, match="microbatch") as refused:
        pipeline.steps.train_microbatches(microbatches([5, 5]))
    return str(refused.value)


def test_numbers_and_sizes_may_differ_from_step_to_step() -> None:
    for _, message in run_in_turn(2, train, with_a_written_schedule):
        assert message.startswith("the written schedule is for 1 microbatch, and a step has 2. Use a family's name")


def of_other_numbers(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    NxDPPModel(llama(2)).steps.train_microbatches(microbatches([5] * (rank + 1)))


def test_ranks_with_other_numbers_are_named() -> None:
    with pytest.raises(AssertionError, match=r"\(rank 0\): 1 microbatch\n.*\(rank 1\): 2 microbatches"):
        run_ranks(2, of_other_numbers)


def replica_that_leaves_a_step_out(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    pipeline = NxDPPModel(llama(2))
    pipeline.steps.train_microbatches(microbatches([5]))
    if rank == 1:
        with pytest.raises(ValueError, match="was given none"):
            pipeline.steps.train_microbatches([])
    pipeline.steps.train_microbatches(microbatches([5]))


def test_replicas_in_different_steps_average_nothing() -> None:
    with pytest.raises(AssertionError, match="is in training step 2, and another in training step 3"):
        run_ranks(2, replica_that_leaves_a_step_out)


def test_no_microbatches_are_refused(one_rank: None) -> None:
    pipeline = NxDPPModel(llama(2))
    with pytest.raises(ValueError, match="at least one microbatch, and was given none"):
        pipeline.steps.train_microbatches([])
    with pytest.raises(ValueError, match="the model returns no loss for these inputs: give labels"):
        pipeline.steps.eval_microbatches([{"input_ids": torch.ones(1, 4, dtype=torch.long)}])
